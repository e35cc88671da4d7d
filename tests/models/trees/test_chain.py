from models.trees import chain


def test_a_chain_is_the_likeliest_token_after_the_likeliest() -> None:
    assert chain.shape(3, chain.Params()) == ((-1, 0, 1), (0, 0, 0))
