"""Compile one kernel with every NVRTC of the matrix and write ``gpu_images.json``: what test_gpu.py reads back.

python tests/unit/manifest/make_gpu_images.py FOLDER_WITH_ONE_SUBFOLDER_PER_INSTALLED_NVRTC
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent.parent))

from op_builder.cuda_toolkits import find_nvrtc, nvrtc_folders
from op_builder.nvrtc import open_nvrtc
from op_builder.targets import Target, supported_by

SOURCE = (
    'extern "C" __global__ void first(float *p) { *p = 1; }\nextern "C" __global__ void second(float *p) { *p = 2; }\n'
)
FORMS = ["sm60", "sm75", "sm90", "sm90a", "sm100", "sm100a", "sm100f", "sm101a", "sm110f", "sm120", "sm120f", "sm121a"]
PTX = ["ptx75", "ptx90a", "ptx100f"]


def main(folder: Path) -> None:
    """Write the file beside this one."""
    places = nvrtc_folders({}, (), [str(p) for p in sorted(folder.iterdir())], None, folder / "nowhere")
    images: dict[str, str] = {}
    for found in sorted(find_nvrtc(places), key=lambda n: n.version):
        library = open_nvrtc(found)
        for variant in FORMS + PTX:
            target = Target.from_variant(variant)
            if supported_by(target, library.version):
                image, _ = library.compile(SOURCE, "two.cu", {}, ["--std=c++17"], target=target)
                key = f"{library.version[0]}.{library.version[1]} {variant}"
                images[key] = base64.b64encode(zlib.compress(image, 9)).decode("ascii")
    text = {"made_by": "python tests/unit/manifest/make_gpu_images.py FOLDER", "images": images}
    (HERE / "gpu_images.json").write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
