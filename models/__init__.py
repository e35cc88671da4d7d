"""Algorithms: tensors in, tensors out. A folder is a family of methods, a file is a method; `catalog` finds them."""
