"""The engine whose members are Hugging Face causal language models."""

from __future__ import annotations

from specens.engines.protocol import Context, Engine, Needs
from specens.engines.transformers.contexts import RaggedContext, SeparateContext
from specens.engines.transformers.kv_cache import check_capacity
from specens.engines.transformers.model import Model
from specens.engines.transformers.probing import reading_of


class CausalLM(Model, Engine):  # type: ignore[override]
    """A loaded model as a member. Texts share one cache where the model reads them so, else each has its own."""

    name = "transformers"

    def check(self, needs: Needs) -> None:
        """Find out by trying how the model is read, and raise ValueError where it cannot be."""
        reading_of(self, needs)

    def check_length(self, num_tokens: int) -> None:
        """Raise ValueError where the cache is of a fixed size, and too small."""
        if self.has_cache:
            check_capacity(self.new_cache(), num_tokens)

    def open(self, needs: Needs) -> Context:
        """An empty context."""
        reading = reading_of(self, needs)
        return RaggedContext(self, reading) if reading.shares else SeparateContext(self, reading, needs.rollback)
