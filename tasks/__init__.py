"""One Prefect task per verb: load, one algorithm, save, log. Between tasks go references, never tensors."""
