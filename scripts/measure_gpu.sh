#!/usr/bin/env bash
# Check and measure on a GPU what docs/performance.md tells: one step after the other, each with a log of its own, so that nothing is lost
# when one is cut short.
#
#   scripts/measure_gpu.sh FOLDER [STEP...]        # STEP_SECONDS=600: the most that one step may take
#
# Steps: tests slow memcheck racecheck synccheck quantizers training linear block shapes linear_shapes stored_shapes engine sync vllm replay two_gpus ablation
set -u
folder=${1:?a folder for the logs}
shift
every="tests memcheck racecheck synccheck quantizers training linear block shapes linear_shapes stored_shapes sync engine vllm replay"
mkdir -p "$folder"

benchmark() { "$PYTHON" -m benchmarks.hopper --only "$1" --json "$folder/$1.json"; }
sanitizer() { compute-sanitizer --tool "$1" --report-api-errors no --print-limit 5 "$PYTHON" scripts/every_kernel.py; }
tests() { "$PYTHON" -m pytest -q -p no:cacheprovider "$@"; }
export -f benchmark sanitizer tests
export folder PYTHON=${PYTHON:-python3}

command_of() {
    case $1 in
        tests) echo "tests tests/gpu/test_kernels.py tests/gpu/test_stored.py tests/gpu/test_digest.py tests/gpu/test_refused.py tests/gpu/test_cuda.py" ;;
        slow) echo "tests tests/gpu/test_kernels.py -m slow" ;;
        memcheck | racecheck | synccheck) echo "sanitizer $1" ;;
        quantizers | training | linear | block | engine | sync) echo "benchmark $1" ;;
        shapes | linear_shapes | stored_shapes) echo "\"\$PYTHON\" -m benchmarks.hopper.$1" ;;
        vllm) echo "tests -s tests/gpu/test_vllm_cuda.py" ;;
        replay) echo "tests -s tests/gpu/test_replay.py" ;;
        two_gpus) echo "tests -s tests/gpu/test_two_gpus_server.py tests/gpu/test_two_gpus_fsdp.py tests/gpu/test_two_gpus_engine.py" ;;
        ablation) echo "\"\$PYTHON\" examples/ablation.py --task reasoning --size 200m --parallel 5 --seeds 0 --steps 40 --output $folder/ablation" ;;
        *) echo "echo no step is called $1; false" ;;
    esac
}

failed=0
for step in ${*:-$every}; do
    start=$SECONDS
    timeout "${STEP_SECONDS:-600}" bash -c "$(command_of "$step")" > "$folder/$step.log" 2>&1
    code=$?
    ((code == 0)) || failed=1
    echo "$step: exit code $code, $((SECONDS - start)) s, $folder/$step.log"
done
exit $failed
