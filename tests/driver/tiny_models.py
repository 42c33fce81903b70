"""Small models for tests that need many forwards; nothing is downloaded."""

import copy
from types import SimpleNamespace

import specens.engines.transformers.contexts
import torch
from specens.engines.transformers.member import Member
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROMPT = [5, 3, 8, 1]


def tiny_llama(seed, vocab=61, sharpness=3.0, **config):
    """A Llama of two layers with random weights; sharpness scales its logits, so that its tokens are not all alike."""
    settings = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | config))).eval()
    model.lm_head.weight.data *= sharpness
    return model


def relative_of(model, seed, noise=0.05):
    """A copy with perturbed weights: a member that mostly agrees."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in twin.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return twin


class Bigram(torch.nn.Module):
    """A model whose next token depends on the last one by a table of logits: fast, and its law is known exactly."""

    def __init__(self, logits):
        super().__init__()
        vocab = logits.shape[0]
        self.config = LlamaConfig(vocab_size=vocab, num_hidden_layers=1, eos_token_id=None, bos_token_id=None)
        self.generation_config = SimpleNamespace(eos_token_id=None)
        self.table = torch.nn.Embedding.from_pretrained(logits)

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, cache=None, use_cache=None, logits_to_keep=0):  # noqa: ARG002
        return SimpleNamespace(logits=self.table(input_ids[:, -logits_to_keep:]))


class HeadedBigram(Bigram):
    """A Bigram with an output layer, whose input is its hidden state."""

    def __init__(self, logits):
        super().__init__(logits)
        self.head = torch.nn.Identity()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, cache=None, use_cache=None, logits_to_keep=0):
        hidden = super().forward(input_ids, cache, use_cache, logits_to_keep).logits
        return SimpleNamespace(logits=self.head(hidden))


def record_members(monkeypatch, member_class=Member):
    """Returns the list to which every member of the generations to come is appended."""
    members = []

    class Recorded(member_class):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            members.append(self)

    monkeypatch.setattr(specens.engines.transformers.contexts, "Member", Recorded)
    return members


def tiny_tokenizer(vocab=61, **special_tokens):
    """A tokenizer of the words w0, w1, ..., each its own number."""
    return word_tokenizer([f"w{index}" for index in range(vocab)], **special_tokens)


def word_tokenizer(words, **special_tokens):
    """A tokenizer of these words, numbered as they come."""
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)


def save_pair(folder):
    """Two related models with one tokenizer, saved as Hugging Face folders; returns their paths."""
    first = tiny_llama(0, max_position_embeddings=200_000)
    paths = []
    for name, model in (("first", first), ("second", relative_of(first, 1, noise=0.2))):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
        paths.append(str(folder / name))
    return paths
