"""Models of transformers whose next token depends on the last one only, and the law of the texts they write."""

import torch
from driver.tiny_models import tiny_llama
from scipy import stats

VOCAB = 7
LEAST_EXPECTED = 5  # of a transition, for the chi-square
LEAST_PROBABILITY = 1e-4  # seeds are fixed, so that a test passes always or never


def markov_llama(seed, sharpness=1.5, layers=1):
    """A Llama without the outputs of its attention."""
    model = tiny_llama(
        seed,
        vocab=VOCAB,
        sharpness=sharpness,
        num_hidden_layers=layers,
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    return model


def as_assistant(model, draft_len):
    """The same model, drafting so many tokens a round."""
    model.generation_config.num_assistant_tokens = draft_len
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@torch.no_grad()
def logits_after(model):
    """float32 [vocab, vocab]: a row for each last token."""
    return model(torch.arange(VOCAB)[:, None]).logits[:, 0]


def fit(texts, law):
    """The probability that chi-square gives texts [tokens] under transition probabilities [vocab, vocab].

    Transitions of probability 0 must not occur.
    """
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for text in texts:
        counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1, dtype=torch.float64), accumulate=True)
    assert counts[law == 0].sum() == 0
    expected = counts.sum(1, keepdim=True) * law.double()
    frequent = expected >= LEAST_EXPECTED
    squares = (counts - expected) ** 2 / expected
    freedom = (frequent.sum(1) - 1).clamp(min=0).sum()
    return float(stats.chi2.sf(float(squares[frequent].sum()), int(freedom)))
