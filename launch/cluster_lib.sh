# shellcheck shell=bash disable=SC2034 # sourced by launch/cluster.sh, which reads what is set here
# Functions of launch/cluster.sh: the host file, commands on hosts, and checks of their answers.

# Check first that this machine has the necessary tools. For example, macOS has bash 3.2 and none of these tools.
missing_tools=()
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || missing_tools+=("bash 4.4 (this is $BASH_VERSION)")
for tool in timeout getent realpath; do
  command -v "$tool" >/dev/null || missing_tools+=("$tool")
done
if [ "${#missing_tools[@]}" -gt 0 ]; then
  (IFS=, && printf 'cluster.sh: this machine lacks %s; run it on Linux, such as the head\n' "${missing_tools[*]}" >&2)
  exit 2
fi

dir=${LEEWAY_DIR:-$here}
port=${LEEWAY_RAY_PORT:-6379}
state=${LEEWAY_STATE:-$HOME/.cache/leeway}
saved_hosts="$state/hosts-$port" # host file with the hosts of the last `up`
log="${LEEWAY_STATE:-/tmp/leeway-UID}/ray-$port/start.log"
hosts_file=${LEEWAY_HOSTS:-}
# Close a connection that is silent for 120 s, so that `run` does not wait forever for a lost head.
keepalive="-o ServerAliveInterval=15 -o ServerAliveCountMax=8"
read -ra ssh <<<"${LEEWAY_SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10 $keepalive}"
token_file=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
max_clocks_apart_s=5
end_s=${LEEWAY_END_S:-720} # a run may need 600 s for its step and 60 s for its report, and it exports its model

hosts=() pools=() addresses=() # one entry per line of the host file
codes=() answers=() errors=()  # exit status, output and last error line of each host's last command
started_s=()                   # start time of each host's last command, by our clock
raylets=()                     # process id of our raylet on each host, empty without one
nodes=                         # hosts as listed by the head: ADDRESS up|lost CPUS GPUS POOLS

fail() {
  printf 'cluster.sh: %s\n' "$1" >&2
  exit "${2:-1}"
}

usage() {
  sed -n '2,/^set /s/^# \{0,1\}//p' "$here/launch/cluster.sh" >&2
  exit 2
}

print_host() { printf '%s: %s\n' "${hosts[$1]}" "$2"; }

problem() { printf 'cluster.sh: %s: %s\n' "$(label "$1")" "$2" >&2; }

label() {
  if [ "${hosts[$1]}" = "${addresses[$1]}" ]; then echo "${hosts[$1]}"; else echo "${hosts[$1]} (${addresses[$1]})"; fi
}

in_array() {
  local value=$1 each
  shift
  for each in "$@"; do [ "$each" != "$value" ] || return 0; done
  return 1
}

# --- the host file ----------------------------------------------------------------------------------

read_hosts() {
  local line number=0 clean
  # removes comments and a byte order mark; replaces non-breaking spaces and the line ends of Windows and old Macs
  clean=(-e $'1s/^\xef\xbb\xbf//' -e $'s/\xc2\xa0/ /g' -e 's/\r$//' -e 's/\r/\n/g' -e 's/#[^\n]*//g')
  if [ -z "$hosts_file" ]; then
    hosts=(localhost) pools=("") addresses=("${LEEWAY_RAY_HOST:-127.0.0.1}")
    return
  fi
  { [ -f "$hosts_file" ] && [ -r "$hosts_file" ]; } ||
    fail "the host file $hosts_file cannot be read; see examples/hosts.txt" 2
  [ "$(tr -dc '\000' <"$hosts_file" | wc -c)" -eq 0 ] ||
    fail "the host file $hosts_file is not UTF-8 text (UTF-16?); save it as UTF-8" 2
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    read_host "$hosts_file:$number" "$line"
  done < <(LC_ALL=C sed "${clean[@]}" "$hosts_file")
  [ ${#hosts[@]} -gt 0 ] || fail "the host file $hosts_file has no hosts; see examples/hosts.txt" 2
  check_addresses
}

read_host() {
  local where=$1 name pool address rest
  read -r name pool address rest <<<"$2" || true
  [ -n "$name" ] || return 0
  [ -z "$rest" ] || fail "$where: remove '$rest'; a line is HOST [POOL[,POOL...] [ADDRESS]]" 2
  [[ $name != -* ]] || fail "$where: '$name' is not a host" 2
  [ "$pool" != - ] || pool=
  [[ $pool =~ ^([A-Za-z0-9_-]+(,[A-Za-z0-9_-]+)*)?$ ]] ||
    fail "$where: '$pool' is not a list of pools; write it as a,b without spaces" 2
  ! in_array "$name" "${hosts[@]}" || fail "$where: $name is listed twice; give all its pools in one line" 2
  hosts+=("$name") pools+=("$pool") addresses+=("${address:-$(address_of "$name")}")
}

# Print the IPv4 address to which this machine resolves a host; print nothing if the host cannot be resolved.
address_of() {
  local name=${1#*@}
  if [[ $name =~ ^[0-9]+(\.[0-9]+){3}$ ]]; then
    echo "$name"
  else
    getent ahostsv4 "$name" | awk 'NR == 1 {print $1}' || true
  fi
}

check_addresses() {
  local i advice="give its private address as the third word of its line in $hosts_file"
  for i in "${!hosts[@]}"; do
    [ -n "${addresses[$i]}" ] || fail "the address of ${hosts[$i]} cannot be resolved here; $advice" 2
    [[ ${addresses[$i]} != *:* ]] || fail "${addresses[$i]} is an IPv6 address, but a cluster needs IPv4; $advice" 2
    [ ${#hosts[@]} -eq 1 ] || [[ ${addresses[$i]} != 127.* ]] ||
      fail "${hosts[$i]} resolves to ${addresses[$i]} here, which other hosts cannot reach; $advice" 2
  done
}

save_hosts() {
  local i
  mkdir -p "$state" 2>/dev/null || true
  { [ -d "$state" ] && [ -O "$state" ]; } || fail "$state is not a folder of this user; set LEEWAY_STATE" 2
  chmod 700 "$state"
  for i in "${!hosts[@]}"; do echo "${hosts[$i]} ${pools[$i]:--} ${addresses[$i]}"; done >"$saved_hosts"
}

# Read the host file, or the hosts of the last `up` if no host file is set.
load_hosts() {
  if [ -z "$hosts_file" ] && [ -s "$saved_hosts" ] && [ -O "$saved_hosts" ]; then hosts_file=$saved_hosts; fi
  read_hosts
}

delete_saved_hosts() {
  rm -f "$saved_hosts"
  [ ! -d "$state" ] || rmdir --ignore-fail-on-non-empty "$state"
}

# --- commands on hosts ------------------------------------------------------------------------------

is_here() { [ "${hosts[$1]}" = localhost ]; }

# Print the path that a local file has on the head; a file of this checkout is in the checkout of the head.
path_on_head() {
  local path=$1 root
  [ ! -f "$path" ] || path=$(realpath "$path")
  root=$(realpath "$here")
  [[ $path != "$root"/* ]] || path=$dir/${path#"$root"/}
  echo "$path"
}

# Print the shell command that runs cluster_host.sh on a host.
command_of() {
  local i=$1 name words
  words=(env "LEEWAY_ADDRESS=${addresses[$i]}" "LEEWAY_POOLS=${pools[$i]}" "LEEWAY_RAY_PORT=$port")
  for name in LEEWAY_STATE LEEWAY_WORKER_PORTS LEEWAY_CPUS; do
    [ -z "${!name:-}" ] || words+=("$name=${!name}")
  done
  printf '%q ' "${words[@]}" "$dir/launch/cluster_host.sh" "${@:2}"
}

# Run cluster_host.sh on a host, with a timeout of $limit_s. `run` has no timeout and does not use this function.
on_host() {
  local i=$1 reach=(bash -c)
  is_here "$i" || reach=("${ssh[@]}" "${hosts[$i]}")
  timeout -k 5 "${limit_s:-${LEEWAY_LIMIT_S:-60}}" "${reach[@]}" "$(command_of "$@")"
}

# Run cluster_host.sh on the head; print its output, or the reason of its failure.
on_head() {
  local code=0
  on_host 0 "$@" </dev/null 2>"$work/head" || code=$?
  [ "$code" = 0 ] || explain_failure 0 "$code" "$(tail -n 1 "$work/head")"
  return "$code"
}

# Run a command of cluster_host.sh on these hosts concurrently, each with input $stdin; set codes, answers and errors.
each_host() {
  local i words children=()
  read -ra words <<<"$1"
  shift
  for i in "$@"; do
    started_s[i]=$(date +%s)
    {
      on_host "$i" "${words[@]}" <"${stdin:-/dev/null}" >"$work/$i.out" 2>"$work/$i.err" || exit $?
      date +%s >"$work/$i.at"
    } &
    children[i]=$!
  done
  for i in "$@"; do
    codes[i]=0
    wait "${children[$i]}" || codes[i]=$?
    answers[i]=$(cat "$work/$i.out")
    errors[i]=$(tail -n 1 "$work/$i.err")
  done
}

# Print the reason and the fix of a failed command on a host.
explain_failure() {
  local i=$1 code=$2 error=$3
  case $code in
  124 | 137) echo "$(label "$i"): no answer in ${limit_s:-${LEEWAY_LIMIT_S:-60}} s (LEEWAY_LIMIT_S); check the host" ;;
  126 | 127) echo "$(label "$i") has no Leeway in $dir; put the same checkout there, or set LEEWAY_DIR" ;;
  255) echo "$(label "$i") cannot be reached: ${error:-no error from ssh}; try '${ssh[*]} ${hosts[$i]} true'" ;;
  *) echo "$(label "$i"): ${error:-its command failed with status $code}" ;;
  esac
}

report_failure() { printf 'cluster.sh: %s\n' "$(explain_failure "$1" "${codes[$1]}" "${errors[$1]}")" >&2; }

make_token() {
  [ ! -s "$token_file" ] || return 0
  (umask 077 && mkdir -p "$(dirname "$token_file")" && od -An -vtx1 -N32 /dev/urandom | tr -d ' \n' >"$token_file")
}

# --- checks before anything is started --------------------------------------------------------------

fact() { awk -v key="$2" '$1 == key {sub("^" key " ", ""); print}' <<<"${answers[$1]}"; }

check_facts() {
  local i failed=0
  for i in "${!hosts[@]}"; do
    if [ "${codes[$i]}" != 0 ]; then
      failed=1
      report_failure "$i"
    else
      raylets[i]=$(fact "$i" raylet)
      check_versions "$i" || failed=1
      check_neighbours "$i" || failed=1
      check_clock "$i"
    fi
  done
  [ "$failed" = 0 ] || exit 1
}

check_versions() {
  local key
  [ "${codes[0]}" = 0 ] || return 0
  for key in python ray leeway; do
    [ "$(fact "$1" "$key")" = "$(fact 0 "$key")" ] || {
      problem "$1" "has $key $(fact "$1" "$key"), but the head has $(fact 0 "$key"); install one version on both"
      return 1
    }
  done
}

# Check for conflicts with other programs on a host, without stopping these programs.
check_neighbours() {
  local number owner
  while read -r number owner; do
    [ -z "$number" ] || {
      problem "$1" "port $number is used by $owner; end that process, or set LEEWAY_RAY_PORT"
      return 1
    }
  done < <(fact "$1" taken)
  while read -r number owner; do
    [ -z "$number" ] || [ -n "${LEEWAY_SHARE_HOSTS:-}" ] || {
      problem "$1" "another Ray is running (process $number, session $owner); end it, or set LEEWAY_SHARE_HOSTS=1"
      return 1
    }
  done < <(fact "$1" other)
}

# Compare the clock of a host with ours. The host read its clock between the start and the end of the command.
check_clock() {
  local apart=0 remote_s
  remote_s=$(fact "$1" time)
  [ "$remote_s" -ge "${started_s[$1]}" ] || apart=$((remote_s - started_s[$1]))
  [ "$remote_s" -le "$(cat "$work/$1.at")" ] || apart=$((remote_s - $(cat "$work/$1.at")))
  [ "${apart#-}" -le "$max_clocks_apart_s" ] ||
    problem "$1" "warning: its clock is ${apart#-} s $([ "$apart" -lt 0 ] && echo behind || echo ahead); set it by NTP"
}

# --- nodes of the head -------------------------------------------------------------------------------

query_head_if_up() {
  [ -n "${raylets[0]}" ] || return 0
  nodes=$(on_head nodes) || fail "$nodes; run '$0 down' first"
}

# Refuse to restart the head, because a restart would end the whole cluster and every run on it.
check_head() {
  if [ -z "${raylets[0]}" ] || is_as_configured 0; then
    return 0
  elif is_in_cluster 0; then
    fail "the pools of the head changed from '$(node_word 0 5)' to '${pools[0]}'; run '$0 down' first"
  fi
  fail "the Ray of the head is not in its own cluster; run '$0 down' first"
}

# Print word number $2 of a host's line in $nodes.
node_word() { awk -v at="${addresses[$1]}" -v word="$2" '$1 == at {print $word}' <<<"$nodes"; }

is_in_cluster() { [ "$(node_word "$1" 2)" = up ]; }

is_as_configured() {
  [ -n "${raylets[$1]}" ] && is_in_cluster "$1" &&
    [ "$(node_word "$1" 5)" = "$(tr , '\n' <<<"${pools[$1]}" | LC_ALL=C sort -u | paste -sd ,)" ]
}

# Stop Ray on hosts of the last `up` that are no longer in the host file.
end_removed_hosts() {
  local name pool address i failed=0 num=${#hosts[@]} advice="or remove lost hosts from $saved_hosts"
  [ -s "$saved_hosts" ] || return 0
  read -r name pool address <"$saved_hosts"
  [ "$name $address" = "${hosts[0]} ${addresses[0]}" ] ||
    fail "the head changed from $name ($address) to $(label 0); run '$0 down' first"
  while read -r name pool address; do
    in_array "$name" "${hosts[@]:0:num}" || { hosts+=("$name") pools+=("") addresses+=("$address"); }
  done <"$saved_hosts"
  [ ${#hosts[@]} -gt "$num" ] || return 0
  each_host stop $(seq "$num" $((${#hosts[@]} - 1)))
  for ((i = num; i < ${#hosts[@]}; i++)); do
    if [ "${codes[$i]}" = 0 ]; then
      print_host "$i" "down, because it is no longer in the host file"
    else
      failed=1 && report_failure "$i"
    fi
  done
  [ "$failed" = 0 ] || fail "Ray may still run on the hosts above; repeat this command when they can be reached, $advice"
  hosts=("${hosts[@]:0:num}") pools=("${pools[@]:0:num}") addresses=("${addresses[@]:0:num}")
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
