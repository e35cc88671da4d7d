"""One Prefect task per verb: load, one algorithm, save, log. What passes between tasks is a reference, never a tensor."""
