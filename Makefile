# SPDX-License-Identifier: Apache-2.0
# The two commands: `make demo` shows flashgrad at work, `make test` checks everything. Each sets up what it needs.
.PHONY: demo test format clean

flashgrad := build/demo/tools/flashgrad/flashgrad
input := data/minilm_layer0.safetensors

demo:
	@scripts/setup.sh build
	@cmake --preset release -B build/demo -DFLASHGRAD_CUDA=OFF --log-level=WARNING
	@cmake --build build/demo --target flashgrad_cli
	$(flashgrad) run --input $(input) --output build/demo/full.safetensors --check
	$(flashgrad) run --input $(input) --output build/demo/causal.safetensors --causal --check
	$(flashgrad) bench --memory

test:
	@scripts/setup.sh test
	@scripts/test.sh

# Rewrites the sources as `make test` wants them.
format:
	@scripts/setup.sh test
	@find include src tools tests examples benchmarks -regextype egrep -regex '.*\.(c|cpp|h|hpp|cu|cuh)' | xargs clang-format-14 -i

clean:
	rm -rf build
