"""For pytest: `-p gpu_stub.plugin` installs the stub, and nothing is compiled."""

from __future__ import annotations

from typing import Any

import gpu_stub

gpu_stub.install()
variants: list[tuple[Any, ...]] = []  # (kernel, signature, constexprs, options, attributes)
gpu_stub.replace_compiler(lambda *variant: variants.append(variant))
