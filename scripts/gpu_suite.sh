#!/bin/sh
# Everything that needs a GPU, in under 9 minutes: the tests marked "cuda", then benchmarks/gpu.py held to its goals.
#
#     scripts/gpu_suite.sh [options of benchmarks/gpu.py]
#
# Installs nothing: the interpreter ($PYTHON, or python3) must have what pyproject.toml names, onnxruntime-gpu with its
# CUDA and cuDNN libraries, and pytest. onnxamp itself is taken from this checkout. Exit code 0: all tests passed and
# all goals hold. $CUDA_TESTS_SECONDS (150) is what the tests may take, $BENCHMARK_SECONDS (380) the benchmark, which
# writes what it has after each network.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0
case " $* " in
*" --provider cpu "*) ;;
*) "$python" -c 'import sys; from onnxamp._runtime.sessions.session import cuda_trouble as why
sys.exit(why() and f"CUDA cannot be used here: {why()}.")' || exit 1 ;;
esac
# File by file: what crashes takes no other tests with it. Last what can be tested without a GPU, too.
until=$(($(date +%s) + ${CUDA_TESTS_SECONDS:-150}))
for file in $(grep -rl --include='test_*.py' 'mark\.cuda' tests | sort | grep -v placement) tests/runtime/test_placement.py; do
    echo "== $file"
    left=$((until - $(date +%s)))
    timeout "$((left > 1 ? left : 1))" "$python" -m pytest "$file" -m cuda -q -p no:cacheprovider -W default
    code=$?
    [ "$code" -eq 0 ] || { echo "FAILED ($code): $file"; status=1; }
done
echo "== how CUDA computes float16"
timeout 60 "$python" scripts/ask_engine.py cuda --check || status=1
timeout "${BENCHMARK_SECONDS:-380}" "$python" benchmarks/gpu.py --check "$@" || status=1
exit "$status"
