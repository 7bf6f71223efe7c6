#!/usr/bin/env bash
# Commands of launch/cluster.sh on one host; called only by that script.
#
#   cluster_host.sh facts HEAD         print installed versions, running processes and conflicts, one fact per line
#   cluster_host.sh start HEAD         start Ray, as the head if HEAD is our address; reads the token from stdin
#   cluster_host.sh stop               end every process of our session, and remove its folder
#   cluster_host.sh nodes              list the hosts of the cluster; this and the next commands run only on the head
#   cluster_host.sh ray-status         show the resources of the cluster and their usage
#   cluster_host.sh run ID COMMAND ... run leeway train or leeway resume
#   cluster_host.sh interrupt ID       signal the process of `run ID` to end
#   cluster_host.sh end-runs SECONDS   signal all runs to end, and wait up to SECONDS
#
# Environment: LEEWAY_ADDRESS (of this host), LEEWAY_POOLS (a,b), LEEWAY_RAY_PORT, LEEWAY_WORKER_PORTS, LEEWAY_CPUS,
# LEEWAY_STATE (/tmp/leeway-UID; a short path on a local disk, because sockets need one and homes may be shared).
set -euo pipefail

dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin="$dir/.venv/bin"
port=${LEEWAY_RAY_PORT:-6379}
address=${LEEWAY_ADDRESS:-127.0.0.1}
state=${LEEWAY_STATE:-/tmp/leeway-$(id -u)}
session="$state/ray-$port" # all files of our Ray on this host
token="$session/auth_token"

# Offsets from the head's port avoid conflicts between two clusters. The ports are those of the raylet, objects, runtime
# environments, the agent, metrics, and Ray's server for remote drivers, which cannot be disabled.
ports=("$((port + 12))" "$((port + 13))" "$((port + 14))" "$((port + 15))" "$((port + 16))" "$((port + 17))")
worker_ports=${LEEWAY_WORKER_PORTS:-20002-20999}

export RAY_USAGE_STATS_ENABLED=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_raylet_start_wait_time_s=60 RAY_worker_niceness=0
export RAY_prestart_worker_first_driver=0 # by default, Ray starts one idle worker per core
export AUTOSCALER_METRIC_PORT=99999 # an invalid port, so that Ray's monitor does not serve metrics on every interface
# Timeouts of silent hosts, explained in docs/cluster.md. A host is lost after 13 failed checks in a row; a check starts
# every second and times out after 5 s. On a host that cannot reach the head for 120 s, Ray exits.
export RAY_health_check_period_ms=1000 RAY_health_check_timeout_ms=5000 RAY_health_check_failure_threshold=13
export RAY_gcs_rpc_server_reconnect_timeout_s=120

fail() {
  printf '%s\n' "$1" >&2
  exit 1
}

# The files in this folder determine the hosts, the token and the files to remove, so it must belong to this user.
check_state() {
  if [ -e "$state" ] || [ -L "$state" ]; then
    { [ -d "$state" ] && [ ! -L "$state" ] && [ -O "$state" ]; } ||
      fail "$state is not a folder of this user; set LEEWAY_STATE to one that is"
  fi
}

is_loopback() { [[ $address == 127.* ]]; }

with_token() { export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token" LEEWAY_RAY_SESSION="$session"; }

# --- our own processes ------------------------------------------------------------------------------

# The session folder is on the command line of Ray's processes, and in the environment of their child processes. A
# process that overwrites both with its own title is found as a descendant of such processes.
own_processes() {
  local pattern found level
  pattern=$(sed 's/[].[\*^$+?(){}|/]/\\&/g' <<<"$session")
  found=$(pgrep -f -- "/ray/.*$pattern/session_" || true)
  found+=" $(grep -lzxF -- "LEEWAY_RAY_SESSION=$session" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 || true)"
  level=$(tr -s ' \n' ',' <<<"$found" | sed 's/^,//; s/,$//')
  while [ -n "$level" ]; do
    found+=" $level"
    level=$(pgrep -d, -P "$level" || true)
  done
  tr -s ' ,' '\n' <<<"$found" | sed '/^$/d' | sort -un
}

our_raylet() {
  local pid
  for pid in $(own_processes); do
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" != raylet ] || echo "$pid"
  done
}

# Print those of the given processes that still run.
alive() { [ $# -eq 0 ] || ps -o pid=,stat= -p "$(tr ' ' , <<<"$*")" | awk '$2 !~ /^Z/ {print $1}' || true; }

stop() {
  local processes
  processes=$(own_processes)
  # shellcheck disable=SC2086 # one argument per process
  [ -z "$processes" ] || kill $processes 2>/dev/null || true
  for _ in $(seq 50); do
    # shellcheck disable=SC2046,SC2086
    processes=$(alive $processes $(own_processes))
    [ -n "$processes" ] || break
    sleep 0.2
  done
  # shellcheck disable=SC2086
  [ -z "$processes" ] || kill -9 $processes 2>/dev/null || true
  rm -rf "$session"
  [ ! -d "$state" ] || rmdir --ignore-fail-on-non-empty "$state"
}

# --- facts ------------------------------------------------------------------------------------------

# Print versions. The version of Leeway ends with digits of a checksum of its code, because checkouts may share a version.
leeway_version() {
  local sum
  sum=$(cd "$dir" && find actors algorithms buffer common launch learner planning weight_sync -name '*.py' -print0 |
    LC_ALL=C sort -z | xargs -0 cat | sha256sum)
  "$bin/python" -c 'from importlib.metadata import version as v; import platform, sys
print("python", platform.python_version())
print("ray", v("ray"))
print("leeway", v("leeway-rl") + "-" + sys.argv[1])' "${sum:0:8}"
}

listening() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# Print the process that listens on a port, if this user may see the process.
listener() {
  local process
  process=$(ss -Hltnp "sport = :$1" 2>/dev/null | grep -o 'users:(("[^"]*",pid=[0-9]*' | head -n 1 |
    sed 's/users:(("\([^"]*\)",pid=\([0-9]*\)/\1, process \2/' || true)
  printf '%s' "${process:-a process not visible to this user}"
}

facts() {
  local head=$1 own other each needed=()
  [ -x "$bin/ray" ] || fail "Leeway is not installed in $dir/.venv; run 'make install' there"
  command -v pgrep >/dev/null || fail "the command pgrep is missing; install it (Debian: apt-get install procps)"
  leeway_version
  echo "time $(date +%s)"
  own=$(our_raylet)
  if [ -n "$own" ]; then
    echo "raylet $own"
  else
    [ "$head" != "$address" ] || needed+=("$port")
    is_loopback || needed+=("${ports[@]}")
    for each in "${needed[@]}"; do
      ! listening "$address" "$each" || echo "taken $each $(listener "$each")"
    done
  fi
  # shellcheck disable=SC2046 # one argument per process; in a container without init, dead processes stay zombies
  for other in $(alive $(pgrep -x raylet || true)); do
    [[ " ${own//$'\n'/ } " == *" $other "* ]] ||
      echo "other $other $(tr '\0' '\n' <"/proc/$other/cmdline" | sed -n 's/^--session_dir=//p')"
  done
}

# --- start ------------------------------------------------------------------------------------------

resources() {
  local pool json=
  for pool in ${LEEWAY_POOLS//,/ }; do
    json+="${json:+, }\"pool_$pool\": 1000"
  done
  printf '{%s}' "$json"
}

# Print the interface with our address. By default, gloo and NCCL use the interface to which the host name resolves.
interface() {
  "$bin/python" -c 'import psutil, sys
print(next((name for name, each in psutil.net_if_addrs().items() if sys.argv[1] in [a.address for a in each]), ""))' \
    "$address"
}

start() {
  local head=$1 arguments name
  mkdir -p "$state"
  check_state
  chmod 700 "$state"
  mkdir -p "$session"
  (umask 077 && cat >"$token")
  [ -s "$token" ] || fail "no token on stdin; start this script through launch/cluster.sh"
  arguments=(--node-ip-address "$address" --temp-dir "$session" --object-store-memory 80000000
    --include-log-monitor false --resources "$(resources)")
  [ -z "${LEEWAY_CPUS:-}" ] || arguments+=(--num-cpus "$LEEWAY_CPUS")
  if ! is_loopback; then
    name=$(interface)
    [ -n "$name" ] || fail "no interface here has the address $address; give the private address in the host file"
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$name}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$name}"
    arguments+=(--node-manager-port "${ports[0]}" --object-manager-port "${ports[1]}"
      --runtime-env-agent-port "${ports[2]}" --dashboard-agent-listen-port "${ports[3]}"
      --metrics-export-port "${ports[4]}" --ray-client-server-port "${ports[5]}"
      --min-worker-port "${worker_ports%-*}" --max-worker-port "${worker_ports#*-}")
  fi
  if [ "$head" = "$address" ]; then
    arguments+=(--head --port "$port" --include-dashboard false)
  else
    arguments+=(--address "$head:$port")
  fi
  with_token
  trap '' USR1 USR2 # these signals are for the launcher of a run; Ray inherits this trap and ignores them
  # `timeout` moves the daemons out of the process group of ssh, into a group of their own
  timeout 90 "$bin/ray" start "${arguments[@]}" >"$session/start.log" 2>&1 </dev/null ||
    fail "Ray did not start: $(grep -v '^ *$' "$session/start.log" | tail -n 1)"
}

# --- on the head ------------------------------------------------------------------------------------

nodes() {
  [ -s "$token" ] || fail "Ray is not up at $address:$port"
  with_token
  cd "$dir"
  exec "$bin/python" -m leeway.launch.cluster_nodes "$address:$port"
}

ray_status() {
  with_token
  exec "$bin/ray" status --address "$address:$port"
}

run() {
  local id=$1
  shift
  with_token
  cd "$dir" # base of relative paths such as runs/NAME
  export LEEWAY_CLUSTER_RUN="$id"
  echo $$ >"$session/run-$id.pid"
  trap '' HUP # continue if the terminal or the connection closes
  exec "$bin/leeway" "$@" --launch.ray_address "$address:$port"
}

# Print the process id of `run ID` if the run still lives; the environment shows if another process reused the id.
process_of() {
  local pid
  pid=$(cat "$session/run-$1.pid" 2>/dev/null) || return 0
  ! grep -qzxF -- "LEEWAY_CLUSTER_RUN=$1" "/proc/$pid/environ" 2>/dev/null || echo "$pid"
}

interrupt() {
  local pid
  pid=$(process_of "$1")
  [ -z "$pid" ] || kill "$pid" 2>/dev/null || true
}

end_runs() {
  local limit_s=$1 file id pid processes=()
  for file in "$session"/run-*.pid; do
    id=${file##*/run-}
    pid=$(process_of "${id%.pid}")
    [ -z "$pid" ] || processes+=("$pid")
  done
  [ ${#processes[@]} -gt 0 ] || return 0
  echo "requested a checkpoint and the end of all runs (process ${processes[*]}); waiting up to $limit_s s"
  kill "${processes[@]}" 2>/dev/null || true
  SECONDS=0
  while [ "$SECONDS" -lt "$limit_s" ]; do
    [ -n "$(alive "${processes[@]}")" ] || return 0
    sleep 0.2
  done
  echo "process ${processes[*]} has not ended within $limit_s s (LEEWAY_END_S); stopping it now"
}

verb=$1
shift
check_state
case $verb in
facts | start | stop | nodes | run | interrupt) "$verb" "$@" ;;
ray-status | end-runs) "${verb//-/_}" "$@" ;;
*) fail "cluster_host.sh: unknown verb '$verb'; start it through launch/cluster.sh" ;;
esac
