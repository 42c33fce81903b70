"""A tokenizer of each kind that models come with, made of a few tokens; nothing is downloaded."""

import functools
import json
import tempfile
from pathlib import Path

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PIECES = ["a", "b", "s", "n", "t", "'", ".", ",", "!", "n't", "'s", "the", "m", "r", "e", "v"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CLEANED = {"clean_up_tokenization_spaces": True}


def numbered(*tokens):
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def byte_level(**settings):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    merges = [("Ġ", "a"), ("Ġ", "'"), ("t", "h"), ("th", "e"), ("Ã", "©"), ("ð", "Ł"), ("å", "¥")]
    vocab = numbered("<|endoftext|>", *alphabet, *map("".join, merges))
    return transformers.GPT2Tokenizer(vocab=vocab, merges=merges, **settings)


def metaspaced(*first):
    return numbered(*first, *BYTES, "▁", "▁▁", *PIECES, *(f"▁{piece}" for piece in PIECES), "好", "\ufffd")


def llama(**settings):
    return transformers.LlamaTokenizer(vocab=metaspaced("<unk>", "<s>", "</s>"), merges=[], **settings)


def gemma(**settings):
    vocab = metaspaced("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    return transformers.GemmaTokenizer(vocab=vocab, merges=[], **settings)


def unigram(**settings):
    pieces = [(token, -1.0) for token in metaspaced("<pad>", "</s>", "<unk>") if token not in BYTES]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=2, **settings)


def word_piece(**settings):
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = numbered(*special, *PIECES, *(f"##{piece}" for piece in PIECES), "好", "?")
    made = transformers.BertTokenizer(vocab=words, **settings)
    made.backend_tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=settings == CLEANED)
    return made


def suffixed(**settings):
    words = numbered("<unk>", *PIECES, *(f"{piece}</w>" for piece in PIECES))
    return transformers.OpenAIGPTTokenizer(vocab=words, merges=[], **settings)


def words(**settings):
    made = Tokenizer(models.WordLevel(numbered("<unk>", *PIECES, "好"), unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", **settings)


def slow_bytes(**settings):
    return transformers.ByT5Tokenizer(extra_ids=2, **settings)


def slow_joined(**settings):
    with tempfile.TemporaryDirectory() as folder:
        vocab, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocab.write_text(json.dumps(numbered("<unk>", *PIECES, *(f"{piece}@@" for piece in PIECES), "@", "@@")))
        merges.write_text("#version\n\n")
        return transformers.CTRLTokenizer(str(vocab), str(merges), **settings)


def slow_word_piece(**settings):
    with tempfile.TemporaryDirectory() as folder:
        vocab = Path(folder, "vocab.txt")
        tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *PIECES, *(f"##{piece}" for piece in PIECES)]
        vocab.write_text("\n".join(tokens))
        return transformers.models.bert.tokenization_bert_legacy.BertTokenizerLegacy(str(vocab), **settings)


KINDS = {
    "byte-level": byte_level,
    "byte-level, cleaned": functools.partial(
        byte_level, clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True, **CLEANED
    ),
    "byte-level, clean-up ignored": functools.partial(byte_level, **CLEANED),
    "llama": llama,
    "gemma": gemma,
    "unigram": unigram,
    "unigram, cleaned": functools.partial(unigram, **CLEANED),
    "word piece": word_piece,
    "word piece, cleaned": functools.partial(word_piece, **CLEANED),
    "end of word": functools.partial(suffixed, **CLEANED),
    "words": functools.partial(words, **CLEANED),
    "slow bytes": slow_bytes,
    "slow joined": functools.partial(slow_joined, **CLEANED),
    "slow word piece": slow_word_piece,
}


@functools.cache
def tokenizer_of(kind):
    """With special and added tokens behind its own."""
    made = KINDS[kind]()
    made.add_special_tokens({"additional_special_tokens": ["<file_sep>", "<|im_end|>"]})
    made.add_tokens([AddedToken("<think>", special=False), AddedToken("ab c", special=False), "\u00e9"])
    return made
