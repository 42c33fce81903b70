"""The law of texts whose next token depends on the last one alone, and how well texts fit it."""

import itertools

import scipy.stats
import torch
from cases import FULL

TEXTS, LENGTH = (
    75 if FULL else 40,
    40,
)  # many rounds of few requests, since to begin a request costs more than a round of it
WINDOW = 2  # tokens that are counted together with the one before them, so that a draw that leans on the last one shows


def fit_of_texts(ensemble, transition, texts=TEXTS, length=LENGTH, batch_size=TEXTS, **settings):
    """The probability of texts that an ensemble writes after token 0, under transition probabilities [vocab, vocab].

    Returns that of a chi-square over each start of a window and the tokens that follow, and the generations.
    """
    prompts = itertools.repeat([0], texts)
    settings = {"max_new_tokens": length, "seed": 0} | settings
    generations = list(ensemble.generate_many(prompts, batch_size=batch_size, **settings))
    return fit_of_tokens([[0, *generation.tokens] for generation in generations], transition), generations


def fit_of_tokens(texts, transition):
    """The same of tokens [texts, any multiple of the window's + 1], the first of each given."""
    vocab = len(transition)
    windows = torch.tensor(texts).unfold(1, WINDOW + 1, WINDOW).reshape(-1, WINDOW + 1)
    counts = torch.zeros([vocab] * (WINDOW + 1), dtype=torch.float64)
    counts.index_put_(tuple(windows.T), torch.ones(len(windows), dtype=torch.float64), accumulate=True)
    law = torch.einsum("ab,bc->abc", transition, transition)
    expected = counts.sum((1, 2))[:, None, None] * law / law.sum((1, 2), keepdim=True)
    return chi_square_probability(counts.flatten(), expected.flatten(), sums_known=vocab)


def chi_square_probability(observed, expected, least=5, sums_known=1):
    """Of counts at least so far from the expected ones; rare cells are put together, impossible ones must be empty."""
    assert observed[expected == 0].sum() == 0
    rare = expected < least
    observed, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (observed, expected))
    if expected[-1] < least:
        observed, expected = (torch.cat([x[:-2], x[-2:].sum()[None]]) for x in (observed, expected))
    return scipy.stats.chisquare(observed, expected, ddof=sums_known - 1).pvalue
