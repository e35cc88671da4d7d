"""Parameter-efficient finetuning: few parameters are trained, the rest of the model stays as it is.

A method's module has `attach(model, params, rng) -> model` (what is trained needs a gradient, all else does not),
`save(model, directory)` and `load(model, directory)` of the small file, bound to its base by a hash, and, where
the result is a plain model, `merge(model) -> PreTrainedModel`.
"""
