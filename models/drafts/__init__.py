"""Draft families. A file here holds a draft's torch module and its directory format, exactly as the engine loads it.

Letters: B sequences, T tokens of a sequence, N rows with a loss, H hidden width, A tapped target layers, V target vocabulary,
D draft vocabulary, K drafted tokens a step.
"""
