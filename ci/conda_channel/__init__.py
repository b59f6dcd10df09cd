"""A conda channel without a channel server: stand-ins for what conda-forge has, our recipe built from them, solved and
installed. ``ci/conda.py`` is the command."""
