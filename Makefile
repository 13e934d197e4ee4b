# Needs python3 (3.11 or newer), make and a package registry that pip or uv is configured for; everything else is installed
# into .venv, with hashes. Only the tests want more: see `browser`.
PYTHON ?= python3
BIN := .venv/bin
# Only the server that is named with the command is used, not one that a shell has exported.
ifneq ($(origin DATABASE_URL),command line)
unexport DATABASE_URL
endif
GIVEN := $(and $(filter command,$(origin DATABASE_URL)),$(DATABASE_URL))
# Bytecode goes into one directory, also where it may not be written beside the sources: otherwise each of the many
# processes of the tests would compile all that it imports.
export PYTHONPYCACHEPREFIX := $(CURDIR)/.pytest_cache/compiled
unexport PYTHONDONTWRITEBYTECODE
POSTGRES15 := /usr/lib/postgresql/15/bin
COMPILE := $(BIN)/uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-header \
	$(if $(filter 1,$(UPGRADE)),--upgrade)

.DEFAULT_GOAL := help
.PHONY: help test quick test-all test-postgres15 browser pooler proxy postgres15 check lint format types imports demo demo-pricing demo-jobs demo-enrichment bench bench-automation bench-start bench-lists bench-retention bench-fairness bench-throttled bench-pricing bench-enrichment bench-jobs bench-agents chaos chaos-automation chaos-pricing chaos-jobs chaos-enrichment coverage-of-requirements requirements sbom vulnerabilities docs clean agent

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-26s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# uv does not read pip's configuration: where only pip knows the registry, pip does the work, more slowly.
.venv/.ready: requirements-dev.txt requirements-uv.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Ecluse needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-uv.txt
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements-dev.txt \
		|| { echo "uv could not reach a registry: pip does it, more slowly"; \
			$(BIN)/python -m pip install --quiet --require-hashes -r requirements-dev.txt; }
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

# Tests that fail beside others are judged once more with the machine to themselves; what fails twice, fails. Anything but
# failed tests (exit code 1), such as an error of collection, is not repeated.
once_more = || { [ $$? = 1 ] && echo "FAILED BESIDE OTHERS; once more, alone:" && $(BIN)/pytest --last-failed --last-failed-no-failures none; }

# A file stays with one worker, and the long ones (pytest.mark.long) come first. Three workers on two cores: a test waits for a
# third of its time.
side_by_side = -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not alone"

test: check browser pooler proxy ## All checks and all tests but the slow ones; DATABASE_URL=… runs them on that server
	$(BIN)/pytest $(side_by_side) --maxfail 30 $(once_more)
	$(BIN)/pytest -m "alone and not slow" $$(grep -rl mark.alone tests) $(once_more)

quick: check ## The inner loop: all checks, unit, engine and repository tests
	$(BIN)/pytest -q $(side_by_side) tests/unit tests/engine tests/insight tests/retention tests/repo

test-all: test ## All checks and all tests, the slow ones too
	$(BIN)/pytest -m slow

# A cluster of its own, made by an ordinary user with Debian's defaults, and an ordinary role: what an operator has.
test-postgres15: .venv/.ready postgres15 pooler ## Engine, flow, fault and database tests on Debian's PostgreSQL 15
	$(BIN)/python -m tools.postgres_cluster $(POSTGRES15) sh -c '$(BIN)/pytest $(side_by_side) \
		tests/engine tests/insight tests/retention tests/flows tests/faults tests/db tests/verify $(once_more)'

# $(call debian,PROGRAM:PACKAGE …) installs what is missing, if it may. Without it some tests fail, and say so.
debian = @missing=$$(PATH="$$PATH:/usr/sbin"; for one in $(1); do command -v $${one%:*} > /dev/null || echo $${one\#*:}; done); \
	[ -z "$$missing" ] || { [ "$$(id -u)" = 0 ] && apt-get update -q && \
		DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$missing; } || \
	echo "Some tests need" $$missing "and will fail without. As root: apt-get install --no-install-recommends" $$missing >&2

# The pages are tested in Chromium, and an unmodified pusher-js in node.
browser: ## Debian's Chromium (headless) and nodejs for the tests, installed when they are missing and we are root
	$(call debian,chromium-headless-shell:chromium-headless-shell node:nodejs)

pooler: ## Debian's pgbouncer, the same way
	$(call debian,pgbouncer:pgbouncer)

proxy: ## Debian's nginx, the same way
	$(call debian,nginx:nginx)

postgres15: ## Debian's postgresql-15, the same way
	$(call debian,$(POSTGRES15)/postgres:postgresql-15)

check: lint types imports ## All checks, no tests

lint: .venv/.ready ## Lint and formatting (ruff)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.ready ## Rewrite the code as the formatter wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/.ready ## Types (mypy --strict)
	$(BIN)/mypy --strict

imports: .venv/.ready ## Who may import whom (import-linter)
	$(BIN)/lint-imports --no-cache

OF_DEMO = $(if $(GIVEN),--given-database) $(if $(filter 1,$(KEEP)),--keep) $(if $(filter 1,$(JSON)),--json)

demo: .venv/.ready ## The scripted demonstration; KEEP=1 leaves it running, JSON=1 prints JSON (with -C: make -s), DATABASE_URL=… names an empty database
	$(BIN)/ecluse demo automation $(OF_DEMO)

demo-pricing: .venv/.ready ## The same for pricing: 500 prices changed and restored in an unreliable shop
	$(BIN)/ecluse demo pricing $(OF_DEMO)

demo-jobs: .venv/.ready ## The same for jobs: 50 schedules, three agents; one is killed, one cut off, the server restarted
	$(BIN)/ecluse demo jobs $(if $(filter 1,$(KEEP)),--keep) $(if $(filter 1,$(JSON)),--json)

demo-enrichment: .venv/.ready ## The same for companies: eight cases of three simulated registers
	$(BIN)/ecluse demo enrichment $(OF_DEMO)

bench: .venv/.ready ## The benchmark; N=20000 sets the number of items, JSON=1 prints JSON
	$(BIN)/python -m bench $(if $(N),--items $(N)) $(if $(filter 1,$(JSON)),--json)

bench-automation: .venv/.ready ## What the automation flow costs above its calls; N=10000 fiches, JSON=1 prints JSON
	$(BIN)/python -m bench.automation $(if $(N),--fiches $(N)) $(if $(filter 1,$(JSON)),--json)

bench-start: .venv/.ready ## Time from the answer to a start to the first vendor call, one replica and three
	$(BIN)/python -m bench.start

bench-lists: .venv/.ready ## How long lists and pages take with 100,000 runs; JSON=1 prints JSON
	$(BIN)/python -m bench.lists $(if $(filter 1,$(JSON)),--json)

bench-retention: .venv/.ready ## How fast old rows are deleted, unnoticed, and the size of a year; N=1000000 items, JSON=1 prints JSON
	$(BIN)/python -m bench.retention $(if $(N),--items $(N)) $(if $(filter 1,$(JSON)),--json)

bench-fairness: .venv/.ready ## How much one tenant under full load slows another, and whether the goals are reached; SECONDS=60, JSON=1 prints JSON
	$(BIN)/python -m bench.fairness $(if $(SECONDS),--seconds $(SECONDS)) $(if $(filter 1,$(JSON)),--json)

bench-throttled: .venv/.ready ## How much a vendor that holds one tenant's key slows another tenant
	$(BIN)/python -m bench.throttled

bench-jobs: .venv/.ready ## How soon due schedules of jobs are rows, with 100,000 of them; JSON=1 prints JSON
	$(BIN)/python -m bench.jobs $(if $(filter 1,$(JSON)),--json)

bench-agents: .venv/.ready ## What 200 waiting agents cost, and how soon a job reaches one of them; JSON=1 prints JSON
	$(BIN)/python -m bench.agents $(if $(filter 1,$(JSON)),--json)

bench-enrichment: .venv/.ready ## How soon requests for companies are answered, and registers called; ONLY="crowd alone cached pace flood", JSON=1 prints JSON
	$(BIN)/python -m bench.enrichment $(ONLY) $(if $(filter 1,$(JSON)),--json)

bench-pricing: .venv/.ready ## How much of a shop's limits is used, previews, pages; ONLY="rate cost preview stop", JSON=1 prints JSON
	$(BIN)/python -m bench.pricing $(ONLY) $(if $(filter 1,$(JSON)),--json)

chaos: .venv/.ready ## Replicas killed at random, then the account; KILLS=200 SEED=1, SEEDS="1 7 42" plays several, SLOW=1 on one slow core, JSON=1 prints JSON
	$(if $(filter 1,$(SLOW)),taskset -c 0 nice) $(BIN)/python -m tests.faults.chaos $(if $(KILLS),--kills $(KILLS)) \
		$(if $(SEEDS)$(SEED),--seed $(or $(SEEDS),$(SEED))) $(if $(filter 1,$(JSON)),--json)

chaos-automation: .venv/.ready ## The same over one run of automation; KILLS=50 FICHES=1000 SEED=1 by default, JSON=1 prints JSON
	$(BIN)/python -m tests.faults.automation_chaos $(if $(KILLS),--kills $(KILLS)) $(if $(FICHES),--fiches $(FICHES)) \
		$(if $(SEED),--seed $(SEED)) $(if $(filter 1,$(JSON)),--json)

chaos-enrichment: .venv/.ready ## The same over the jobs of many companies; KILLS=100 COMPANIES=700 SEED=1 by default, JSON=1 prints JSON
	$(BIN)/python -m tests.faults.enrichment_chaos $(if $(KILLS),--kills $(KILLS)) $(if $(COMPANIES),--companies $(COMPANIES)) \
		$(if $(SEED),--seed $(SEED)) $(if $(filter 1,$(JSON)),--json)

chaos-pricing: .venv/.ready ## The same over one apply of a rule run; KILLS=50 TARGETS=5000 SEED=1 by default, JSON=1 prints JSON
	$(BIN)/python -m tests.faults.pricing_chaos $(if $(KILLS),--kills $(KILLS)) $(if $(TARGETS),--targets $(TARGETS)) \
		$(if $(SEED),--seed $(SEED)) $(if $(filter 1,$(JSON)),--json)

chaos-jobs: .venv/.ready ## The same over jobs, agents killed, too; KILLS=100 JOBS=1000 SEED=1 by default, JSON=1 prints JSON
	$(BIN)/python -m tests.faults.jobs_chaos $(if $(KILLS),--kills $(KILLS)) $(if $(JOBS),--jobs $(JOBS)) \
		$(if $(SEED),--seed $(SEED)) $(if $(filter 1,$(JSON)),--json)

coverage-of-requirements: .venv/.ready ## Which requirements no test cites
	$(BIN)/python tools/coverage_of_requirements.py

requirements: .venv/.ready ## Write requirements*.txt from pyproject.toml; UPGRADE=1 takes newer versions too
	$(COMPILE) --group installer --output-file requirements-uv.txt
	$(COMPILE) pyproject.toml --output-file requirements.txt
	$(COMPILE) pyproject.toml --extra embedded --group dev --group build --constraint requirements.txt --output-file requirements-dev.txt
	@! grep -nE '://|[ =]/' requirements*.txt || { echo "a host or a path of this machine slipped in" >&2; exit 1; }

agent: ## The agent as one file, dist/ecluse-agent.pyz, which any Python 3.11 or newer runs
	$(PYTHON) -m tools.agent_zip dist/ecluse-agent.pyz

sbom: .venv/.ready ## The bill of materials (CycloneDX JSON) of requirements.txt, in dist/ecluse.cdx.json
	mkdir -p dist
	$(BIN)/python -m tools.sbom > dist/ecluse.cdx.json

# Works without a network; no advisories come with the project.
vulnerabilities: .venv/.ready ## Pinned packages against known vulnerabilities; ADVISORIES=all.zip is the export of OSV for PyPI
	$(BIN)/python -m tools.vulnerabilities $(ADVISORIES)

docs: .venv/.ready ## Write the generated documents
	$(BIN)/python -m ecluse.settings > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(BIN)/python -m tools.state_machines > docs/state_machines.md.new
	mv docs/state_machines.md.new docs/state_machines.md
	$(BIN)/python -m tools.prometheus_rules > docs/prometheus-rules.yml.new
	mv docs/prometheus-rules.yml.new docs/prometheus-rules.yml
	for page in errors api; do $(BIN)/python -m tools.api_docs $$page > docs/$$page.md.new && mv docs/$$page.md.new docs/$$page.md; done
	$(BIN)/python -m tools.commands json > src/ecluse/cli/commands.json.new
	mv src/ecluse/cli/commands.json.new src/ecluse/cli/commands.json
	$(BIN)/python -m tools.commands docs > docs/cli.md.new
	mv docs/cli.md.new docs/cli.md

clean: ## Remove the environment and the caches (never data)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
