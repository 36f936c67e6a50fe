#!/usr/bin/env bash
# Wheels for a GPU machine that cannot reach a package index: bench/gpu/carry.sh FOLDER [python version, 3.12].
# It is to have cupy-cuda13x with its CUDA libraries, cuDNN, PyTorch, NumPy, Numba, Pillow, setuptools, tqdm, safetensors,
# hypothesis and pytest; the rest goes into FOLDER: 32 MB, half of it NumPy in a version that Numba takes. gRPC, its tools
# and protobuf come together: stubs are refused by libraries that are older than the tools they were made with.
# oneDNN stays behind: what the CPU computes is in tests/gpu/cpu_losses.json.
set -euo pipefail
folder=${1:?say where to put the wheels}
version=${2:-3.12}
platforms=()
for n in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do platforms+=(--platform "${n}_x86_64"); done
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
  --implementation cp "${platforms[@]}" -d "$folder" \
  'numpy>=2.0,<2.5' 'nvidia-cudnn-frontend>=1.18,<1.29' 'multiprocess>=0.70.17,<0.71' 'dill>=0.3' 'simplejpeg>=1.8,<2' \
  'grpcio>=1.66,<2' 'grpcio-health-checking>=1.66,<2' 'grpcio-tools>=1.66,<2' 'protobuf>=5.27,<8'
ls -lh "$folder"
