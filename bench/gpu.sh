#!/usr/bin/env bash
# What a GPU must show, as one command: the engines' conformance suite inside the sandbox, vLLM writing and torch
# reading, one learning step, tokens a second. The table goes to docs/results.md, between two marks.
#
#   bench/gpu.sh                         on a machine with a GPU: 15 minutes on one H100
#   SHOAL_DEVICE=cpu bench/gpu.sh        a tiny model on the CPU: does the script work?
#
# PYTHON is Shoal's Python (.venv/bin/python), SHOAL_VLLM one that has vLLM too (or nothing: that part is skipped),
# SHOAL_MODEL the model that vLLM writes with, RESULTS the page. A part that fails is a line of the table, and the
# script goes on; its exit status is then 1.
set -uo pipefail
cd "$(dirname "$0")/.."
DEVICE=${SHOAL_DEVICE:-cuda}
PYTHON=${PYTHON:-.venv/bin/python}
RESULTS=${RESULTS:-docs/results.md}
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
export SHOAL_DEVICE=$DEVICE SHOAL_DEEP=1 SHOAL_SANDBOX=1
if [ "$DEVICE" = cpu ]; then
  SIZES=(tiny) GENERATED=(--rows 16 --new 4 --rounds 1) ONLY=(-k "torch and (reads or told_to)") GROUPS_=2
else
  SIZES=(smollm2 1.5b) GENERATED=(--rows 256 1024 --new 64 --rounds 3) ONLY=() GROUPS_=16
fi
failed=0
row() { printf '| %s | %s | %s |\n' "$1" "$2" "$3" >>"$FOLDER/table"; }
part() { # part NAME LOG COMMAND...: a line of the table with how it ended and its last line
  local name=$1 log=$FOLDER/$2 status=0 start=$SECONDS; shift 2
  echo "== $name" >&2
  "$@" >"$log" 2>&1 || status=$?
  [ "$status" = 0 ] || { failed=1; tail -n 20 "$log" >&2; }
  row "$name" "$([ "$status" = 0 ] && echo passed || echo "failed, status $status")" \
    "$(grep -v '^$' "$log" | tail -n 1 | tr -d '|=' | cut -c1-100), $((SECONDS - start)) s"
}

part "engines' conformance in the sandbox, $DEVICE" conformance \
  "$PYTHON" -m pytest -q tests/conformance/test_engines.py ${ONLY[@]+"${ONLY[@]}"}
if [ -n "${SHOAL_VLLM:-}" ]; then
  part "vLLM writes on $DEVICE, torch reads" engines "$SHOAL_VLLM" -m bench engines --writer vllm --reader torch \
    --device "$DEVICE" --groups "$GROUPS_" --cheats 1 --falsified 1 --new-tokens 16 \
    ${SHOAL_MODEL:+--model "$SHOAL_MODEL"} --json "$FOLDER/engines.json"
else
  row "vLLM writes, torch reads" "not run" "SHOAL_VLLM names no Python that has vLLM"
fi
part "draw, replay and learn: ${SIZES[*]}" devices "$PYTHON" -m bench devices --device "$DEVICE" \
  --shapes "${SIZES[@]}" --learn "${SIZES[@]}" "${GENERATED[@]}" --json "$FOLDER/devices.json"

"$PYTHON" - "$FOLDER" "$RESULTS" "$DEVICE" <<'END'
import datetime, json, pathlib, sys

folder, page, device = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
log = (folder / "devices").read_text() if (folder / "devices").exists() else ""
lines = [f"## One machine's devices: `bench/gpu.sh`", "",
         f"{log.partition(chr(10))[0] or device}, {datetime.date.today()}.", "",
         "| part | outcome | last line |", "|---|---|---|", *(folder / "table").read_text().splitlines()]
if (folder / "devices.json").exists():
    lines += ["", "| case | what | median |", "|---|---|---|"]
    lines += [f"| {row['case']} | {row['subject']}, {row['metric']} | {row['median']:,.4g} {row['unit']} |"
              for row in json.loads((folder / "devices.json").read_text())["rows"]]
begin, end = "<!-- bench/gpu.sh begins -->", "<!-- bench/gpu.sh ends -->"
text = page.read_text() if page.exists() else ""
before, _, rest = text.partition(begin)
after = rest.partition(end)[2] if rest else "\n"
page.write_text(f"{before.rstrip()}\n\n{begin}\n" + "\n".join(lines) + f"\n{end}{after}")
END
echo "the table: $RESULTS" >&2
exit "$failed"
