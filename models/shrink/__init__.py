"""Shrinking: a model of a smaller shape, as a valid Hugging Face checkpoint.

A method's module has `shrink(model, documents, params, training, seed, work_dir, on_progress) -> PreTrainedModel`. It
returns a new model of the given one's class whose config says its shape; `documents` are token ids to measure
importance on and, where the method trains, to train on with the settings `training`.
"""
