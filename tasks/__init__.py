"""One Prefect task per verb: load, one algorithm, save, log. Between tasks go references, never tensors.

Every module here has a task; parts of tasks lie in packages: `stages`, what makes a directory once, and `measure`, what
measures.
"""
