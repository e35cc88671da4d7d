"""Pruning: zeroes in the weights of linear layers, whose shapes stay.

Letters: O outputs and I inputs of a layer, N calibration tokens.

A method's module has `prune(weight [O, I], inputs [N, I], pattern, params) -> [O, I]`, and `CALIBRATED`: whether it
reads `inputs`. `prune_model` walks over a model.
"""
