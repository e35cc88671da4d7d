"""Data selection: which documents of a pool are worth training on.

Letters: M documents of the pool, H width of a document's features.

A method's module has `score(proxy, documents, chosen, params, rng) -> Tensor [M]`: how much each document of the pool
is wanted next, the highest first. `proxy` is a `Proxy`; `chosen` [C] int64 are the places in the pool that were taken
in earlier rounds; the scores of those are not read. `select` runs the rounds.
"""
