#!/bin/sh
# Install Mesa's software Vulkan, on which ONNX Runtime's WebGPU provider runs without a GPU. It has to be 25.0 or newer:
# Debian 12 has that in its backports, which are added where they are not among the sources; other systems install what
# they have. Where none can be had, the tests marked "webgpu" are skipped, and say so.
set -eu
export DEBIAN_FRONTEND=noninteractive
installed=$(dpkg-query --show --showformat '${Version}' mesa-vulkan-drivers 2>/dev/null || true)
if [ -n "$installed" ] && dpkg --compare-versions "$installed" ge 25.0; then
    exit 0
fi
. /etc/os-release
from=
if [ "${VERSION_CODENAME:-}" = bookworm ]; then
    if ! apt-cache policy | grep -q 'n=bookworm-backports'; then
        echo "deb http://deb.debian.org/debian bookworm-backports main" >/etc/apt/sources.list.d/onnxamp-backports.list
    fi
    from="--target-release bookworm-backports"
fi
apt-get update -qq
# shellcheck disable=SC2086 # it is empty, or two words
apt-get install -y -qq --no-install-recommends $from mesa-vulkan-drivers
