#!/bin/sh
# Everything that needs a GPU, in under 9 minutes: the tests marked "cuda", then benchmarks/gpu.py held to its goals.
#
#     scripts/gpu_suite.sh [options of benchmarks/gpu.py]
#
# Installs nothing: the interpreter ($PYTHON, or python3) must have what pyproject.toml names, onnxruntime-gpu with its
# CUDA and cuDNN libraries, and pytest. onnxamp itself is taken from this checkout. Exit code 0: all tests passed and
# all goals hold. $CUDA_TESTS_SECONDS (120) is what each test file may take, $BENCHMARK_SECONDS (390) the
# benchmark, which writes what it has after each network.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
status=0
case " $* " in
*" --provider cpu "*) ;;
*) "$python" -c 'import sys; from onnxamp.runtime.session import cuda_trouble as why
sys.exit(why() and f"CUDA cannot be used here: {why()}.")' || exit 1 ;;
esac
# File by file, with a limit for each: what crashes or hangs takes no other tests with it.
for file in $(grep -l 'mark\.cuda' tests/test_*.py); do
    echo "== $file"
    timeout "${CUDA_TESTS_SECONDS:-120}" "$python" -m pytest "$file" -m cuda -q -p no:cacheprovider -W default
    code=$?
    [ "$code" -eq 0 ] || { echo "FAILED ($code): $file"; status=1; }
done
timeout "${BENCHMARK_SECONDS:-390}" "$python" benchmarks/gpu.py --check "$@" || status=1
exit "$status"
