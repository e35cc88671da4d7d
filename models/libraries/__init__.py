"""Ideas that no engine here runs, each as small as it allows and held to its law or limit by its test.

A module here is called from Python alone, has a signature of its own and says in its docstring why it is no method of a
family: it changes a model that is not decoded here, or trains in another way than by following a gradient.
"""
