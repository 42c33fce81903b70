"""Models of the Hugging Face hub by their names, found as transformers finds them: first in the local cache."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")


def find_in_hub(text: str, revision: str | None = None) -> tuple[str, str, Path] | None:
    """The name of a model, its commit and the folder of its snapshot; None where the text cannot be such a name.

    text: NAME or NAME@REVISION. revision: a branch, tag or commit where the text has none.
    HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN mean what they mean to transformers; of the model
    only its configuration is read, or fetched where it is not cached. Without a connection the cache is all there is.
    Raises ValueError where it cannot be had.
    """
    match = NAME.fullmatch(text)
    if match is None or text.endswith(".gguf"):
        return None
    name, own = match["name"], match["revision"] or revision
    try:
        config = cached_file(name, "config.json", revision=own, local_files_only=is_out_of_reach())
    except OSError as error:
        raise ValueError(_explanation(name, own, error)) from error
    if config is None:
        raise ValueError(f"the model {name!r} of the Hugging Face hub has no config.json")
    return name, extract_commit_hash(config, None) or own or "main", Path(config).parent


def is_out_of_reach() -> bool:
    """Whether no connection to the hub can be made, as its name has no address: asking it all the same takes long."""
    host = urlsplit(constants.ENDPOINT).hostname
    if host is None or constants.HF_HUB_OFFLINE or getproxies():
        return constants.HF_HUB_OFFLINE
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return True
    return False


def _explanation(name: str, revision: str | None, error: OSError) -> str:
    which = "" if revision is None else f" at revision {revision!r}"
    command = f"hf download {name}" + ("" if revision is None else f" --revision {revision}")
    if constants.HF_HUB_OFFLINE:
        why = f"HF_HUB_OFFLINE is set and the cache {constants.HF_HUB_CACHE} does not have it"
    elif is_out_of_reach():
        why = f"{constants.ENDPOINT} cannot be reached and the cache {constants.HF_HUB_CACHE} does not have it"
    else:
        why = " ".join(str(error).split())
    return f"if it names a model of the Hugging Face hub{which}: {why}; with a connection, try: {command}"
