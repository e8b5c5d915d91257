#!/bin/sh
# Slurm TaskProlog, as the job's user: print exports, each only where the user set nothing.
# Always exits 0, within 2 s: Slurm fails a task whose TaskProlog fails. See ../README.md.

trap 'exit 0' EXIT
exec </dev/null 2>/dev/null
PATH=/usr/bin:/bin:/usr/sbin:/sbin
set -f

site=${TRAINARCHIVE_HOOKS_CONF:-/etc/trainarchive/hooks.conf}
spool=/var/spool/trainarchive
stdout_mode=
if [ -f "$site" ]; then
	while IFS= read -r line || [ -n "$line" ]; do
		case $line in
		TRAINARCHIVE_SPOOL=*) spool=${line#*=} ;;
		SLURM_STDOUTMODE=*) stdout_mode=${line#*=} ;;
		esac
	done <"$site"
fi
spool=${TRAINARCHIVE_SPOOL:-$spool}

# Slurm reads line by line: a value with a newline would become a command of its own.
offer() {
	case $2 in *'
'*) return ;; esac
	printf 'export %s=%s\n' "$1" "$2"
}

if [ -n "$stdout_mode" ] && [ -z "${SLURM_STDOUTMODE+set}" ]; then
	offer SLURM_STDOUTMODE "$stdout_mode"
fi

job=${SLURM_JOB_ID:-${SLURM_JOBID-}}
case $job in '' | *[!0-9]* | 0* | ???????????*) exit ;; esac
attempt=${SLURM_RESTART_COUNT:-0}
case $attempt in *[!0-9]* | 0?* | ??????????*) attempt=0 ;; esac
private=${spool%/}/jobs/$job.$attempt

# Only the child looks: on a hung mount it hangs, this shell goes on. It must not hold stdout,
# which Slurm reads to its end.
sleep 1.5 >/dev/null &
limit=$!
{
	[ -d "$private" ] && [ -w "$private" ]
	found=$?
	kill -KILL "$limit"
	exit "$found"
} >/dev/null &
look=$!
wait "$limit"
if [ $? -ne 137 ]; then
	kill -KILL "$look"
	exit
fi
wait "$look" || exit

[ -n "${TRAINARCHIVE_DIR+set}" ] || offer TRAINARCHIVE_DIR "$private"
[ -n "${NCCL_DEBUG_FILE+set}" ] || offer NCCL_DEBUG_FILE "$private/nccl.%h.%p.log"
# PyTorch reads the first name, then the second (older releases only that): a user who set either has
# chosen. It appends the rank.
if [ -z "${TORCH_FR_DUMP_TEMP_FILE+set}${TORCH_NCCL_DEBUG_INFO_TEMP_FILE+set}" ]; then
	offer TORCH_FR_DUMP_TEMP_FILE "$private/nccl_trace_rank_"
	offer TORCH_NCCL_DEBUG_INFO_TEMP_FILE "$private/nccl_trace_rank_"
fi
