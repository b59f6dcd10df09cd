"""The build farm: every cell of CUDA x torch x GPU architecture, and the ship set of wheels and conda packages.

``ci/farm`` is its command line. What the cells are and what they are called is decided in ``op_builder/cells.py``;
parts are planned and compiled by the same functions that wheels and run-time builds use. Here they are put together:

    home.py       the farm's folder: store, compilers, records
    sets.py       the parts a cell, the cell set or the ship set consists of
    compilers.py  NVRTC of each release, fetched once
    parts.py      building what the store lacks, exporting a set as a folder
    images.py     a cell's image, through an engine (engines.py) from docker/Dockerfile
    records.py    what was built, how long it took, how large it is
    dockerfile.py bake.py workflow.py page.py   what is rendered: Dockerfile, bake file, CI workflow, report
"""
