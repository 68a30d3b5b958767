# shellcheck shell=bash
# Sourced by chromium.sh and node.sh: `install_packages LOG PACKAGE...` installs packages of Debian, as root or by a sudo
# that asks for nothing; its status says whether they are there now.

install_packages() {
  local log=$1 root=""
  shift
  if [ "$(id -u)" -ne 0 ]; then
    root="sudo -n"
    command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null || return 1
  fi
  command -v apt-get >/dev/null 2>&1 || return 1
  echo "set-up: installing Debian's $*"
  export DEBIAN_FRONTEND=noninteractive
  { $root apt-get update -qq && $root apt-get install -y -qq --no-install-recommends "$@"; } >"$log" 2>&1 && return 0
  tail -n 5 "$log" >&2
  return 1
}
