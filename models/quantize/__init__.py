"""Quantization: fewer bits a weight, an activation or a cached key, and what that costs.

Letters: O outputs and I inputs of a layer, N tokens, G weights of a group.

A method's module has `quantize(model, documents, params) -> Quantized`: a model that computes as the quantized one
does, and its size in bytes; and, where an engine serves the format, `STORED`, the name of the compressed-tensors format
that `save` writes.
"""
