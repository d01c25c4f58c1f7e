# The environment that scripts/demo and scripts/test run in: system packages, .venv, CRIU.
# Sourced (POSIX sh) from the root of the clone. Everything is checked first and only what is missing is installed,
# so a second run starts quickly and needs neither the network nor root.

say() {
    printf '%s\n' "$*" >&2
}

die() {
    say "error: $1"
    [ $# -lt 2 ] || say "hint: $2"
    exit 4
}

# Prints a Python that is 3.10 or newer and can make a virtual environment: $PYTHON, else the system's, else one on PATH.
# The system's is built to be fast: gpucr's start takes a fifth less processor time than with one that pyenv has built.
# Debian splits ensurepip off into python3-venv: without it `-m venv` fails half way.
find_python() {
    for candidate in ${PYTHON:-/usr/bin/python3 python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

c_compiler_works() {
    printf '#include <stdio.h>\nint main(void) { return 0; }\n' | cc -x c -fsyntax-only - 2>/dev/null
}

# $1 as for set_up. Prints the Debian packages whose function this machine lacks. What CRIU needs is not among them:
# `gpucr criu` brings it along. The tests of that fetching sign package repositories of their own; those of several nodes and of
# batch systems make networks of their own, and root's block packets in every way that there is.
missing_packages() {
    find_python >/dev/null || echo python3 python3-venv
    c_compiler_works || echo gcc libc6-dev
    if [ -n "$1" ] && command -v apt-get >/dev/null; then
        command -v gpg >/dev/null && command -v gpg-agent >/dev/null || echo gpg gpg-agent
        command -v gpgv >/dev/null || echo gpgv
        command -v ip >/dev/null || echo iproute2
        [ "$(id -u)" -ne 0 ] || command -v iptables-legacy >/dev/null || echo iptables
    fi
}

# $1 as for set_up.
install_packages() {
    packages=$(missing_packages "$1" | tr '\n' ' ')
    [ -n "$packages" ] || return 0
    command -v apt-get >/dev/null ||
        die "this machine lacks what these Debian packages hold: $packages" "install them and run this script again"
    [ "$(id -u)" -eq 0 ] ||
        die "system packages are missing: $packages" "run: sudo apt-get update && sudo apt-get install -y $packages"
    say "Installing system packages: $packages"
    apt-get update -qq || die "apt-get update failed" "look at the messages above"
    # shellcheck disable=SC2086  # a list of words is meant
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $packages >/dev/null ||
        die "apt-get install failed" "look at the messages above"
}

# $1 as for set_up. The tests of containers need root and runc, and are skipped where that cannot be had.
install_runc() {
    if [ -z "$1" ] || [ "$(id -u)" -ne 0 ] || command -v runc >/dev/null || ! command -v apt-get >/dev/null; then
        return 0
    fi
    say "Installing runc, for the tests of containers"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends runc; } \
        >/dev/null 2>&1 || say "warning: runc could not be installed, and these tests are skipped"
}

# $1 as for set_up. The stamp says what .venv was made from: a changed pin, dependency or folder makes it anew.
install_python_packages() {
    stamp="$PWD $(cat pyproject.toml constraints.txt | cksum)"
    if [ -x .venv/bin/gpucr ] && .venv/bin/python -c '' 2>/dev/null; then
        for extras in "$1" "[dev,bench]"; do
            [ "$(cat .venv/installed-from 2>/dev/null)" != "$extras $stamp" ] || return 0
        done
    fi
    python=$(find_python) || die "there is no Python 3.10 or newer with venv" "install python3 and python3-venv"
    say "Installing gpucr$1 and its dependencies into .venv ($("$python" -V))"
    "$python" -m venv --clear .venv || die "the virtual environment .venv could not be made"
    # The build backend is pinned as well, which is why it is installed first and used without build isolation.
    # What is imported is compiled then, and the rest never.
    for arguments in "hatchling editables" "--no-build-isolation -e .$1"; do
        # shellcheck disable=SC2086  # a list of words is meant
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt $arguments ||
            die "pip could not install the Python packages" "look at the messages above"
    done
    printf '%s\n' "$1 $stamp" >.venv/installed-from
}

provide_criu() {
    ! .venv/bin/gpucr criu --no-fetch >/dev/null 2>&1 || return 0
    say "Fetching CRIU, which this machine lacks"
    .venv/bin/gpucr criu >&2 || die "CRIU could not be provided" "gpucr criu says more"
}

# In a chroot into a plain folder neither CRIU nor unshare(1) works (GPUCR-CHROOT in error_codes.md).
require_mounted_root() {
    while read -r _ _ _ _ point _; do
        [ "$point" != / ] || return 0
    done </proc/self/mountinfo
    die "the root folder of this chroot is not a mount, which CRIU needs" \
        "mount it over itself before the chroot: mount --rbind TREE TREE; chroot TREE"
}

# $1: "", "[docs]" or "[dev,bench]", the extras to install.
set_up() {
    require_mounted_root
    install_packages "$1"
    install_runc "$1"
    install_python_packages "$1"
    provide_criu
}
