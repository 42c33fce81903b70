"""Where the driver meets model libraries: the only folder that imports transformers."""
