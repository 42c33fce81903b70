"""The command line; here what it knows before any package is loaded."""

INTERRUPTED = 130  # the exit code after Ctrl-C
DRIVER = ("transformers", "typer", "rich", "safetensors")
INSTALL_DRIVER = "pip install 'specens-kernels[driver]'"
