#!/usr/bin/env bash
# Everything that needs a GPU, in one go and under six minutes: correctness first, then speed beside PyTorch.
#
#   bench/gpu/run_all.sh [FOLDER]      facts.json, log.txt, results.jsonl and the measured plans.json go to FOLDER
#                                      (default: runs/gpu)
#
# PYTHON is the interpreter (default python3), with the project's packages and, for the benches, PyTorch. Wheels that it
# lacks are taken from WHEELS (see carry.sh) without an index. The tests are a gate: nothing is timed when they fail.
# LIMIT_SECONDS is when the last part has to end (345); what does not fit is left out by name, the most important parts
# come first. PARTS names the parts to run, e.g. in a second run: PARTS="sanitizer-racecheck mnist-step resnet18-all".
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(mkdir -p "${1:-runs/gpu}" && cd "${1:-runs/gpu}" && pwd)
python=${PYTHON:-python3}
: >"$out/log.txt"
began=$SECONDS
left() { echo $((${LIMIT_SECONDS:-345} - (SECONDS - began))); }
part() { # name, most seconds, command...
  local name=$1 most=$2
  shift 2
  if [ -n "${PARTS:-}" ] && [[ " $PARTS " != *" $name "* ]]; then return 0; fi
  local rest=$(left)
  [ "$rest" -lt "$most" ] && most=$rest
  if [ "$most" -lt 10 ]; then echo "== $name: left out, no time left"; return 1; fi
  echo "== $name" | tee -a "$out/log.txt"
  timeout --kill-after=5 "$most" "$@" >>"$out/log.txt" 2>&1
  local code=$?
  tail -n "${LINES_SHOWN:-25}" "$out/log.txt"
  echo "== $name: exit $code, $((SECONDS - began)) s since the start"
  return $code
}

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 BENCH_PEERS_PYTHON="$(command -v "$python")"
if [ -n "${WHEELS:-}" ]; then
  site=$(mktemp -d)
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$WHEELS"/*.whl || exit 1
  export PYTHONPATH="$PYTHONPATH:$site"
fi
"$python" -m bench.gpu.facts | tee "$out/facts.json" || exit 1

# Plugins and warnings of whatever else is installed there have no say.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
part tests 170 "$python" -m pytest tests/gpu -q -W default --maxfail=30 --tb=short --durations=5 || { echo "the GPU tests failed; nothing is timed"; exit 1; }
LINES_SHOWN=3
steps=("$python" -m bench.gpu.steps)
measured=(--rounds 3 --plans "$out/plans.json")
part host 40 "$python" -m bench.gpu.host resnet18
part resnet18 70 "${steps[@]}" resnet18 --quick "${measured[@]}"
part resnet50 100 "${steps[@]}" resnet50 --quick "${measured[@]}"
# Only the dataserver needs the stubs of gRPC; they are made anew, for the libraries of this interpreter.
"$python" -c 'import setup; setup.generate_stubs()' || echo "== mnist: the stubs were not made; those that are there are used"
part mnist 120 "$python" -m bench.gpu.mnist
export PATH="$PATH:/usr/local/cuda/bin"
if command -v compute-sanitizer >/dev/null; then
  part sanitizer-memcheck 60 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -m bench.gpu.sanitized
  part sanitizer-racecheck 60 compute-sanitizer --tool racecheck --error-exitcode 9 "$python" -m bench.gpu.sanitized
else
  echo "== sanitizer: left out, there is no compute-sanitizer"
fi
part mnist-step 75 "${steps[@]}" mlp --without-compile "${measured[@]}"
part resnet18-all 200 "${steps[@]}" resnet18 "${measured[@]}"
part resnet50-all 200 "${steps[@]}" resnet50 --without-compile "${measured[@]}"
grep '^{' "$out/log.txt" >"$out/results.jsonl"
cat "$out/results.jsonl"
echo "all in $((SECONDS - began)) s; see $out"
