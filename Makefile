# make install   .venv with the package, megatron-core and the development tools
# make test      the test suite
# make test-gpu  what needs a GPU; PYTHON=... names a Python that has torch with CUDA
# make lint      ruff and pyright
# make demo      what the project does, on this machine
# make clean     removes .venv and every cache

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SETUP := pyproject.toml constraints-dev.txt

# The demo, one command a line; `make demo` runs them in this order.
define DEMO
$(BIN)/ep-overlap doctor
$(BIN)/ep-overlap train --model megatron --overlap-moe-expert-parallel-comm --data-parallel-sharding-strategy optim_grads_params --max-unsharded-units 2 --train-iters 5 --check-parity --trace out/trace.json
$(BIN)/ep-overlap timeline out/trace.json -o out/timeline.png
$(BIN)/ep-overlap bench --json out/bench.json
endef

.PHONY: install test test-gpu lint style types demo clean

install: $(STAMP)

$(STAMP): $(SETUP) scripts/find_python.sh
	@test ! -L $(VENV) || { echo "$(VENV) is a link; remove it: it would be cleared" >&2; exit 1; }
	@python="$$(PYTHON='$(PYTHON)' sh scripts/find_python.sh)" && \
	    echo "creating $(VENV) with $$python" && \
	    "$$python" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --constraint constraints-dev.txt --editable '.[dev]'
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest

test-gpu:
	$(or $(PYTHON),$(BIN)/python) -m pytest tests/gpu

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

demo: $(STAMP)
	@mkdir -p out
	$(DEMO)

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find ep_overlap fsdp_hooks tests -name __pycache__ -type d -prune -exec rm -rf {} +
