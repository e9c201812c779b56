"""The faults that `benchmarks/fault_sowing.py` sows: what is changed, and who is to notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One change of the code that a test must notice.

    `old` stands once in the package, or once in the file named `stem` where other files have it
    too; `new` takes its place. `before` is such a pair for code from before a renaming. A test is
    `file::test_name`, perhaps with [parameters], or the name alone where it is the only one.
    """

    name: str
    package: str
    stem: str
    kind: str
    old: str
    new: str
    tests: tuple[str, ...]
    before: tuple[str, str] | None = None

    @property
    def spellings(self) -> list[tuple[str, str]]:
        """Old and new texts, the present ones first."""
        return [(self.old, self.new), *([self.before] if self.before else [])]


_SIGN = "wrong sign"
_INDEX = "swapped index"
_CHECK = "lost check"
_LOCK = "dropped lock"
_OFF_BY_ONE = "off by one"
_ORDER = "wrong order"
_UPDATE = "lost update"
_VALUE = "wrong value"

_ACTORS = [
    Fault(
        "stop-strings-take-the-last",
        "actors", "stop_strings", _VALUE,
        "at, size = min(places)", "at, size = max(places)",
        ("test_parts::test_stop_strings",),
    ),
    Fault(
        "stop-strings-hold-too-little",
        "actors", "stop_strings", _OFF_BY_ONE,
        "for size in range(1, min(len(stop)", "for size in range(2, min(len(stop)",
        ("test_pieces_do_not_matter_to_one_stop_string",),
    ),
    Fault(
        "last-tokens-of-a-step-first",
        "actors", "token_batch", _ORDER,
        "in (*silent, *heard)]", "in (*heard, *silent)]",
        ("test_requests_wait_for_each_other",),
    ),
    Fault(
        "prompts-never-yield",
        "actors", "scheduler", _SIGN,
        "self._lead_ns -= took_ns", "self._lead_ns += took_ns",
        ("test_turns_halve_the_time",),
    ),
    Fault(
        "pages-given-back-in-reverse",
        "actors", "kv_pool", _ORDER,
        "self._free_pages.extend(reversed(self._lent.pop(slot)))",
        "self._free_pages.extend(self._lent.pop(slot))",
        ("test_pages_freed_last_are_lent_first",),
    ),
    Fault(
        "the-last-page-is-never-lent",
        "actors", "kv_pool", _OFF_BY_ONE,
        "num_pages + num_spare_pages > len(self._free_pages)",
        "num_pages + num_spare_pages >= len(self._free_pages)",
        ("test_no_page_has_two_owners",),
    ),
    Fault(
        "a-page-too-few",
        "actors", "kv_pool", _OFF_BY_ONE,
        "return -(-num_positions // PAGE_POSITIONS)", "return num_positions // PAGE_POSITIONS",
        ("test_more_than_a_slot_can_have",),
    ),
    Fault(
        "logprobs-add-the-sum",
        "actors", "token_logprobs", _SIGN,
        "float(logits[token_id]) - log_sum, top", "float(logits[token_id]) + log_sum, top",
        ("test_prompts_and_answers_are_scored_in_company",),
    ),
    Fault(
        "logprobs-come-too-early",
        "actors", "token_logprobs", _OFF_BY_ONE,
        "self._held[0][0] < num_shown", "self._held[0][0] <= num_shown",
        ("test_logprobs_come_with_the_text_that_they_begin_in",),
    ),
    Fault(
        "ids-beyond-the-vocabulary",
        "actors", "prompts", _CHECK,
        "if not 0 <= token_id <= last:", "if not 0 <= token_id:",
        ("test_bad_prompts_are_refused_before_they_wait",),
    ),
    Fault(
        "logits-of-the-first-tokens",
        "actors", "engine", _INDEX,
        "request[FIRST_LOGIT] = num_tokens - num_logits", "request[FIRST_LOGIT] = 0",
        ("test_only_the_logits_asked_for",),
    ),
    Fault(
        "dense-skips-and-exact-does-not",
        "actors", "engine", _VALUE,
        'alike = ALL_FIRE if mode == "dense" else',
        'alike = ALL_FIRE if mode != "dense" else',
        ("test_exact_mode_computes_only_neurons_that_fire",),
    ),
    Fault(
        "hot-neurons-are-not-asked",
        "numba_kernels", "layer_walk", _UPDATE,
        "walk[FIRST] = GPU if facts.num_hot[walk[AT_LAYER]] else GPU + 1",
        "walk[FIRST] = GPU + 1",
        ("test_hot_and_cold_equal_all_cold",),
    ),
    Fault(
        "nan-of-an-ffn-is-not-seen",
        "numba_kernels", "layer_walk", _CHECK,
        "if not finite_pair(buffers.ffn_input, buffers.hidden, num_tokens):",
        "if not finite_pair(buffers.ffn_input, buffers.ffn_input, num_tokens):",
        ("test_bad_numbers_of_hot_neurons_are_the_gpus",),
    ),
    Fault(
        "a-job-does-not-wait",
        "actors", "request_queue", _CHECK,
        "if self._scheduler.is_idle:", "if self._scheduler is not None:",
        ("test_a_job_waits_for_the_request_in_progress",),
    ),
    Fault(
        "the-last-in-line-is-started",
        "actors", "request_queue", _INDEX,
        "while self._waiting and self._start(self._waiting[0]):",
        "while self._waiting and self._start(self._waiting[-1]):",
        ("test_those_for_whom_there_is_no_room_wait",),
    ),
    Fault(
        "cancelled-for-ever",
        "actors", "request_events", _UPDATE,
        "self._cancelled_early.remove(stream.request_id)", "pass",
        ("test_cancelled_before_it_comes_and_while_it_waits",),
    ),
    Fault(
        "windows-beside-another-position",
        "actors", "scoring", _INDEX,
        "reference[at - first] = row", "reference[at - first - 1] = row",
        ("test_a_predicting_mode_beside_dense_equals_transformers",),
    ),
    Fault(
        "fired-and-listed-swapped",
        "actors", "scoring", _INDEX,
        "+= (num_listed, num_fired_listed, num_fired, num_up)",
        "+= (num_listed, num_fired, num_fired_listed, num_up)",
        ("test_recall_and_precision_equal_a_count_neuron_by_neuron",),
    ),
    Fault(
        "profiled-over-the-opening-token",
        "actors", "profiling", _OFF_BY_ONE,
        "range(self.num_opening + first, self.num_opening + last)", "range(first, last)",
        ("test_counts_and_inputs_are_those_of_transformers",),
    ),
    Fault(
        "counts-of-the-first-layer-everywhere",
        "actors", "profiling", _UPDATE,
        "first += len(ids)", "first += 0",
        ("test_counts_and_inputs_are_those_of_transformers",),
    ),
    Fault(
        "the-last-round-is-not-uploaded",
        "actors", "neuron_upload", _OFF_BY_ONE,
        "while num_rounds == _UNKNOWN or number <= num_rounds:",
        "while num_rounds == _UNKNOWN or number < num_rounds:",
        ("test_cuda_streaming::test_logits_equal_transformers",),
    ),
    Fault(
        "rounds-overlap",
        "actors", "neuron_bundles", _CHECK,
        "return first, min(first + self.num_rows, num_neurons)",
        "return first, first + self.num_rows",
        ("test_the_places_of_a_bundle",),
    ),
    Fault(
        "request-numbers-grow-for-ever",
        "numba_kernels", "mailbox", _UPDATE,
        "number + 1 if number < LAST_NUMBER else FIRST_NUMBER", "number + 1",
        ("test_request_numbers_start_anew",),
    ),
    Fault(
        "answers-of-the-first-service",
        "actors", "call_exchange", _INDEX,
        'return {"partials": buffers.partials[service, :num_tokens]}',
        'return {"partials": buffers.partials[1, :num_tokens]}',
        ("test_questions_and_answers_can_be_copied",),
    ),
    Fault(
        "an-eleventh-failed-replacement",
        "actors", "recovery", _OFF_BY_ONE,
        "self._num_in_a_row >= MAX_FAILURES", "self._num_in_a_row > MAX_FAILURES",
        ("test_ten_failed_replacements_are_enough_however_slow",),
    ),
    Fault(
        "a-service-is-doubted-always",
        "actors", "recovery", _CHECK,
        "if last is not None and now - last <= WINDOW_S:",
        "if last is not None and now < last:",
        ("test_a_service_is_doubted_once_a_minute",),
    ),
    Fault(
        "the-lost-cache-is-not-told",
        "actors", "recovering_exchange", _CHECK,
        "if service == _GPU:", "if service < _GPU:",
        ("test_what_is_replaced_and_what_is_told",),
    ),
    Fault(
        "a-pulse-waits-too-long",
        "actors", "watch", _OFF_BY_ONE,
        "self._num_looks < patience", "self._num_looks <= patience",
        ("test_a_pulse_counts_unanswered_looks",),
    ),
    Fault(
        "only-the-own-host-is-asked",
        "actors", "hosts_exchange", _SIGN,
        "if self._remote.isdisjoint(services):", "if not self._remote.isdisjoint(services):",
        ("test_answers_of_all_hosts_are_fetched",),
    ),
    Fault(
        "a-failure-is-not-told",
        "actors", "service", _UPDATE,
        "self.buffers.replies[self.index, STATUS] = FAILED", "pass",
        ("test_an_unknown_operation_is_named_and_survived",),
    ),
    Fault(
        "old-requests-are-answered-again",
        "actors", "service", _VALUE,
        "args=(i, seen), name=", "args=(i, 0), name=",
        ("test_services_attach_to_an_arena_that_was_used",),
    ),
    Fault(
        "the-down-bias-is-taken-off",
        "actors", "prompt_ffn", _SIGN,
        "out[begin:end] += arrays.down_bias[layer]", "out[begin:end] -= arrays.down_bias[layer]",
        ("test_in_process::test_only_the_logits_asked_for",),
    ),
    Fault(
        "a-token-does-not-see-itself",
        "actors", "prompt_attention", _OFF_BY_ONE,
        "mask = theirs <= at", "mask = theirs < at",
        ("test_in_process::test_only_the_logits_asked_for",),
    ),
    Fault(
        "more-neurons-than-there-are",
        "actors", "fit", _CHECK,
        "max(0, min(left // sizes.neuron, wanted.num_hot_neurons))",
        "max(0, left // sizes.neuron)",
        ("test_all_of_it_where_there_is_room",),
    ),
    Fault(
        "buckets-of-one-neuron-more",
        "actors", "snapshot", _OFF_BY_ONE,
        "* NUM_BUCKETS // ffn_size", "* NUM_BUCKETS // (ffn_size + 1)",
        ("test_buckets_are_runs_of_neighbours",),
    ),
    Fault(
        "the-speed-of-long-ago",
        "actors", "snapshot", _SIGN,
        "if now_s - record.ended_s < _RECENT_S]", "if now_s - record.ended_s > _RECENT_S]",
        ("test_speed_is_of_the_last_seconds",),
    ),
    Fault(
        "the-first-neuron-is-nobodys",
        "actors", "dealing", _OFF_BY_ONE,
        "ids[thread :: len(owners)]", "ids[thread + 1 :: len(owners)]",
        ("test_each_neuron_is_dealt_once",),
    ),
    Fault(
        "planned-neurons-are-dealt-too",
        "actors", "hot_neurons", _OFF_BY_ONE,
        "owned |= plan.neuron_device >= plan.num_gpus",
        "owned |= plan.neuron_device > plan.num_gpus",
        ("test_every_neuron_has_one_place",),
    ),
    Fault(
        "a-cache-smaller-than-the-context",
        "actors", "choose", _CHECK,
        "if number is not None and number < context:", "if number is not None and number < 0:",
        ("test_requests_at_once_and_their_cache",),
    ),
    Fault(
        "the-result-is-forgotten",
        "actors", "messages", _INDEX,
        "            later.result,\n", "            self.result,\n",
        ("test_events_of_a_request_are_joined_in_order"
            "|test_letters_of_a_request_are_joined_in_order",),
    ),
    Fault(
        "parts-of-the-arena-overlap",
        "actors", "arena", _UPDATE,
        "at += _padded(kind, shape)", "at += _padded(kind, shape) // 2",
        ("test_arena_parts_do_not_overlap_and_are_shared",),
    ),
    Fault(
        "a-chunk-of-too-few-tokens",
        "actors", "step_sizes", _OFF_BY_ONE,
        "and num_tokens >= MATRIX_TOKENS:", "and num_tokens > MATRIX_TOKENS:",
        ("test_chunks_depend_on_the_length_alone",),
    ),
    Fault(
        "later-trial-wins",
        "actors", "kept_trial", _UPDATE,
        "return replace(first, is_kept=first.tokens_per_s != tried.tokens_per_s)", "return tried",
        ("test_of_two_that_try_at_the_same_time_both_take_the_first_ones",),
    ),
    Fault(
        "one-state-for-all-tokens",
        "actors", "token_batch", _INDEX,
        "request.embed(place, hidden[row])", "request.embed(place, hidden[0])",
        ("test_an_embedding_is_the_mean_of_transformers_states[llama-gqa]",),
    ),
    Fault(
        "everybody-is-handed-states",
        "actors", "token_batch", _CHECK,
        "if request.embeds:\n                    request.embed(place",
        "if True:\n                    request.embed(place",
        ("test_embeddings_have_the_same_bits_in_any_company[exact-False]",),
    ),
    Fault(
        "a-rehearsal-that-failed-is-noted",
        "actors", "rehearsal", _CHECK,
        "process.wait() == 0", "process.wait() >= 0",
        ("test_a_rehearsal_takes_place_once",),
    ),
    Fault(
        "one-rehearsal-for-all-modes",
        "actors", "rehearsal", _UPDATE,
        "asked = system.mode, system.weight_dtype", "asked = system.weight_dtype",
        ("test_a_rehearsal_takes_place_once",),
    ),
    Fault(
        "a-rehearsal-where-nothing-is-promised",
        "actors", "rehearsal", _CHECK,
        "None if system.storage is None else _note_of(system)", "_note_of(system)",
        ("test_a_rehearsal_takes_place_once",),
    ),
    Fault(
        "a-whole-file-of-neurons-begun-anew",
        "model", "pack", _CHECK,
        "if os.path.samestat(os.stat(part), os.fstat(descriptor)):", "if True:",
        ("test_what_another_process_is_writing_is_waited_for_and_taken",),
    ),
    Fault(
        "every-hosts-processes-on-the-drivers",
        "actors", "needs", _UPDATE,
        "2 + system.num_cpu_actors // num_hosts", "2 + system.num_cpu_actors",
        ("test_memory_is_that_of_each_host",),
    ),
    Fault(
        "more-on-a-gpu-than-it-has",
        "actors", "gpu_share", _CHECK,
        "min(budget or found[1] - reserve_bytes, found[1])",
        "budget or found[1] - reserve_bytes",
        ("test_no_more_is_expected_of_a_gpu_than_it_has",),
    ),
    Fault(
        "a-gpu-tried-in-vain-takes-nothing",
        "actors", "storage", _UPDATE,
        "process_bytes=need.process_bytes + CUDA_BYTES", "process_bytes=need.process_bytes",
        ("test_a_gpu_that_was_tried_in_vain_costs_memory",),
    ),
    Fault(
        "slots-in-equal-parts",
        "actors", "shards", _UPDATE,
        "num_up_downs=storage.num_up_downs * own // max(1, total)",
        "num_up_downs=storage.num_up_downs // 2",
        ("test_services_have_slots_as_they_have_neurons",),
    ),
    Fault(
        "chunks-of-a-prompt-at-one-place",
        "actors", "prompt_chunk", _UPDATE,
        "request.num_done + sum(request.chunk_sizes[:before])", "request.num_done",
        ("test_chunks_of_a_prompt_go_through_each_layer_together",),
    ),
    Fault(
        "chunks-keep-a-kernels-tokens",
        "actors", "prompt_chunk", _VALUE,
        "chunk.pause(self._engine.max_tokens)", "chunk.pause(self._engine.kernel_tokens)",
        ("test_chunks_of_a_prompt_go_through_each_layer_together",),
    ),
    Fault(
        "the-next-layer-too-early",
        "actors", "prompt_chunk", _OFF_BY_ONE,
        "chunk.run_layer(chunk.next_layer + is_last)", "chunk.run_layer(chunk.next_layer + 1)",
        ("test_chunks_of_a_prompt_go_through_each_layer_together",),
    ),
    Fault(
        "bits-of-the-first-service-for-all",
        "predictors", "read_ahead", _INDEX,
        "bit_starts(among[:, 1], row_words)[0] + among[:, 0] * row_words",
        "bit_starts(among[:, 1], row_words)[0]",
        ("test_services_read_ahead_by_the_bits_that_the_driver_laid",),
    ),
    Fault(
        "bits-in-memory-counted-twice",
        "actors", "storage_shares", _UPDATE,
        "stat().st_size - storage.predictor_words * WORD_BYTES", "stat().st_size",
        ("test_bits_of_predictors_are_in_memory_once",),
    ),
    Fault(
        "predictors-wanted-on-every-host",
        "actors", "host_files", _CHECK,
        "if file and (Path(file).exists() or not spec.has_own_files)", "if file",
        ("test_a_host_without_predictors_reads_nothing_ahead",),
    ),
    Fault(
        "outputs-where-neurons-are-chosen",
        "actors", "shards", _CHECK,
        'system.mode in ("dense", THRESHOLD)', 'system.mode in ("dense", "exact", THRESHOLD)',
        ("test_where_rows_are_neurons",),
    ),
    Fault(
        "outputs-quantized-anew",
        "actors", "shards", _CHECK,
        "        and not system.weight_dtype\n", "",
        ("test_where_rows_are_neurons",),
    ),
    Fault(
        "a-plan-beside-rows-of-outputs",
        "actors", "preflight", _CHECK,
        "keeps = not has_plan and can_keep_outputs", "keeps = can_keep_outputs",
        ("test_where_rows_are_neurons",),
    ),
]  # fmt: skip

_NUMBA_KERNELS = [
    Fault(
        "two-tokens-swapped",
        "numba_kernels", "rows", _INDEX,
        "= two[0], two[1]\n            t += 2", "= two[1], two[0]\n            t += 2",
        ("test_rows::test_rows_times_vectors[numba-17-f32]",),
    ),
    Fault(
        "the-last-rows-are-nobodys",
        "numba_kernels", "rows", _OFF_BY_ONE,
        "units = (length + unit - 1) // unit", "units = length // unit",
        ("test_threads_side_by_side[f32]",),
    ),
    Fault(
        "the-root-of-a-difference",
        "numba_kernels", "norm", _SIGN,
        "math.sqrt(total / x.shape[0] + epsilon)", "math.sqrt(total / x.shape[0] - epsilon)",
        ("test_rms_norm",),
    ),
    Fault(
        "a-layer-norm-without-its-mean",
        "numba_kernels", "norm", _UPDATE,
        "out[i] = (x[i] - mean) * scale * weight[i]", "out[i] = x[i] * scale * weight[i]",
        ("test_layer_norm",),
    ),
    Fault(
        "heads-turn-the-wrong-way",
        "numba_kernels", "attention", _SIGN,
        "a * cos_sin[0, i] - b * cos_sin[1, i]", "a * cos_sin[0, i] + b * cos_sin[1, i]",
        ("test_rope",),
    ),
    Fault(
        "a-softmax-that-overflows",
        "numba_kernels", "attention", _VALUE,
        "top = max(top, scores[p])", "top = min(top, scores[p])",
        ("test_large_scores_do_not_overflow[numba]",),
    ),
    Fault(
        "the-last-of-equals",
        "numba_kernels", "sampling", _OFF_BY_ONE,
        "if logits[i] > logits[best]:", "if logits[i] >= logits[best]:",
        ("test_greedy_takes_the_first_of_equals",),
    ),
    Fault(
        "min-p-keeps-the-unlikely",
        "numba_kernels", "sampling", _SIGN,
        "or weight < min_p):", "or weight > min_p):",
        ("test_only_what_the_filters_keep_and_all_of_it",),
    ),
    Fault(
        "a-divergence-of-another-sign",
        "numba_kernels", "scoring", _SIGN,
        "(dense_log_p - (np.float64(logits[i]) - log_sum))",
        "(dense_log_p + (np.float64(logits[i]) - log_sum))",
        ("test_equals_scipys_relative_entropy",),
    ),
    Fault(
        "infinite-counts-as-finite",
        "numba_kernels", "finite", _OFF_BY_ONE,
        "return largest < _INFINITE", "return largest <= _INFINITE",
        ("test_finite_numbers_end_where_float32_ends",),
    ),
    Fault(
        "a-partial-is-left-out",
        "numba_kernels", "merge", _OFF_BY_ONE,
        "for s in range(first, partials.shape[0]):",
        "for s in range(first + 1, partials.shape[0]):",
        ("test_in_process::test_only_the_logits_asked_for",),
    ),
    Fault(
        "relu-swallows-a-nan",
        "numba_kernels", "activations", _CHECK,
        "np.float32(0) if value <= function.threshold else value",
        "value if value > function.threshold else np.float32(0)",
        ("test_nan_input_is_not_swallowed[numba]",),
    ),
    Fault(
        "the-weight-of-another-neuron",
        "numba_kernels", "ffn", _INDEX,
        "add_scaled1(out, down, ids[i], h[i])", "add_scaled1(out, down, ids[i], h[0])",
        ("test_ffn::test_sparse_ffn[numba-3-reglu-f16]",),
    ),
    Fault(
        "lists-of-the-block-before",
        "numba_kernels", "batch_ffn", _UPDATE,
        "    lists.counts[:] = 0\n    _list_wanted(token_masks", "    _list_wanted(token_masks",
        ("test_a_step_of_many_tokens_is_as_single_steps",),
        ("    lists.counts[:] = 0\n    _list_wanted(tokens", "    _list_wanted(tokens"),
    ),
    Fault(
        "a-nan-asks-for-nobody",
        "numba_kernels", "predict", _CHECK,
        "if not scores[t, n] <= 0:", "if scores[t, n] > 0:",
        ("test_select",),
    ),
    Fault(
        "thresholds-are-added",
        "numba_kernels", "predict", _SIGN,
        "np.float32(most - 2 * count) - thresholds[n]",
        "np.float32(most - 2 * count) + thresholds[n]",
        ("test_sign_scores",),
    ),
    Fault(
        "no-relu-between-the-layers",
        "numba_kernels", "predict", _UPDATE,
        "scales[j] * max(out[t, j], np.float32(0))", "scales[j] * out[t, j]",
        ("test_lowrank[5-6-65-33-uint16]",),
    ),
    Fault(
        "one-waiter-is-woken",
        "numba_kernels", "doorbell", _LOCK,
        "_futex_wake(cells, index, _ALL)", "_futex_wake(cells, index, np.int64(1))",
        ("test_every_waiter_is_woken",),
    ),
    Fault(
        "threads-pass-the-barrier",
        "numba_kernels", "doorbell", _LOCK,
        "while wait_change(cells, generation_cell, generation, 2000, 100_000_000) == generation:",
        "while wait_change(cells, generation_cell, generation, 0, 0) != generation:",
        ("test_barrier",),
        (
            "while wait_change(words, generation_cell, generation, 2000, 100_000_000) "
            "== generation:",
            "while wait_change(words, generation_cell, generation, 0, 0) != generation:",
        ),
    ),
    Fault(
        "the-first-thread-rings",
        "numba_kernels", "mailbox", _LOCK,
        "np.int32(1)) == num_threads - 1:", "np.int32(1)) == 0:",
        ("test_any_number_of_services_and_threads",),
    ),
    Fault(
        "an-older-answer-is-taken",
        "numba_kernels", "mailbox", _CHECK,
        "if value == number:", "if value != seen:",
        ("test_an_answer_to_an_older_request_is_not_taken",),
    ),
    Fault(
        "a-block-is-taken-twice",
        "numba_kernels", "work_stealing", _LOCK,
        "atomic_add(counters, part * INTS_A_CELL, np.int32(1))",
        "atomic_add(counters, part * INTS_A_CELL, np.int32(0))",
        ("test_each_block_is_taken_once",),
        (
            "add_word(deal, part * WORDS_A_CELL, np.int32(1))",
            "add_word(deal, part * WORDS_A_CELL, np.int32(0))",
        ),
    ),
    Fault(
        "quantized-with-the-other-sign",
        "numba_kernels", "quantize_kernels", _SIGN,
        "uint8(-whole if scaled < 0 else whole)", "uint8(whole if scaled < 0 else -whole)",
        ("test_bytes_are_ggufs",),
    ),
    Fault(
        "a-nibble-of-sixteen",
        "numba_kernels", "quantize_kernels", _CHECK,
        "uint8(min(int32(15), int32(values[k] * inverse + float32(8.5))))",
        "uint8(int32(values[k] * inverse + float32(8.5)))",
        ("test_bytes_are_ggufs",),
    ),
    Fault(
        "rows-end-in-other-numbers",
        "numba_kernels", "int16_matmul", _UPDATE,
        "                wide[0, i] = 0\n", "                wide[0, i] = 1\n",
        ("test_int16_matmul::test_linear[5-37-71-f16]",),
    ),
    Fault(
        "values-of-the-first-token",
        "numba_kernels", "prompt_ffn", _INDEX,
        "ids[found], values[found] = n, h[t, n]", "ids[found], values[found] = n, h[0, n]",
        ("test_prompt_ffn::test_fired_neurons[two-5-32-f16]",),
    ),
    Fault(
        "a-token-is-left-out-of-attention",
        "numba_kernels", "serve_attention", _OFF_BY_ONE,
        "length, pages = buffers.positions[t] + 1, buffers",
        "length, pages = max(1, buffers.positions[t]), buffers",
        ("test_in_process::test_only_the_logits_asked_for",),
    ),
    Fault(
        "all-types-under-one-lock",
        "numba_kernels", "kernel_cache", _LOCK,
        "_locked(self._file(_digest_of(sig)))", '_locked(self._file("all"))',
        ("test_nobody_waits_for_other_types",),
    ),
    Fault(
        "called-kernels-for-python",
        "numba_kernels", "called_kernels", _INDEX,
        "known, key = self.__dict__.setdefault(\"variants\", {}), (args, is_called())",
        "known, key = self.__dict__.setdefault(\"variants\", {}), (args, False)",
        ("test_called_kernels_have_no_machine_code",),
    ),
    Fault(
        "blocks-minima-are-added",
        "numba_kernels", "block_kernels", _SIGN,
        "block[2], block[3] ^ 0x80", "block[2], block[3]",
        ("test_what_has_a_format_of_its_own",),
    ),
    Fault(
        "the-fifth-bit-is-the-fourth",
        "numba_kernels", "block_kernels", _INDEX,
        "codes[k] |= uint8(((block[16 + k] >> part) & 1) << 4)",
        "codes[k] |= uint8(((block[16 + k] >> part) & 1) << 3)",
        ("test_what_has_a_format_of_its_own",),
    ),
    Fault(
        "upper-bits-of-the-wrong-half",
        "numba_kernels", "block_kernels", _ORDER,
        "of_chunk[place] | (upper << 4)", "of_chunk[place] | (upper << 2)",
        ("test_what_has_a_format_of_its_own",),
    ),
    Fault(
        "an-infinite-minimum-passes",
        "numba_kernels", "block_kernels", _CHECK,
        "if block[1] & 0x7C == 0x7C or block[3] & 0x7C == 0x7C:", "if block[1] & 0x7C == 0x7C:",
        ("test_what_has_a_format_of_its_own",),
    ),
    Fault(
        "minima-of-four-bits-are-added",
        "numba_kernels", "block_kernels", _SIGN,
        "-(least * float32(offset))", "least * float32(offset)",
        ("test_q4_k_as_q4_1_keeps_its_values_and_rounds_its_scales",),
    ),
    Fault(
        "a-minimum-beyond-float16",
        "numba_kernels", "block_kernels", _CHECK,
        "if not (abs(scale) <= _LARGEST_HALF and abs(least) <= _LARGEST_HALF):",
        "if not abs(scale) <= _LARGEST_HALF:",
        ("test_q4_k_beyond_float16_is_refused",),
    ),
    Fault(
        "five-bits-without-a-minimum",
        "numba_kernels", "formats", _VALUE,
        "Q5_K: RowFormat(5, has_min=True,", "Q5_K: RowFormat(5,",
        ("test_what_has_a_format_of_its_own",),
    ),
    Fault(
        "rows-of-blocks-are-added-up",
        "numba_kernels", "formats", _CHECK,
        "return self.bits in (4, 8) and not self.in_blocks", "return self.bits in (4, 8)",
        ("test_rows_that_are_not_made_for_sums_are_refused",),
    ),
    Fault(
        "what-adds-little-stays",
        "numba_kernels", "dense_ffn", _UPDATE,
        "gates[t, n] = value if is_kept else np.float32(0)", "gates[t, n] = value",
        ("test_dense_ffn::test_thresholds_leave_out_what_adds_little[4-0]",),
    ),
    Fault(
        "gates-that-did-not-pass-stay",
        "numba_kernels", "dense_ffn", _UPDATE,
        "    gates[first:last] = 0\n", "",
        ("test_dense_ffn::test_thresholds_leave_out_what_adds_little[1-0]",),
    ),
    Fault(
        "the-last-token-says-whose-up-is-read",
        "numba_kernels", "dense_ffn", _UPDATE,
        "wants_up |= is_kept", "wants_up = is_kept",
        ("test_dense_ffn::test_thresholds_leave_out_what_adds_little[4-0]",),
    ),
    Fault(
        "down-rows-of-one-length",
        "numba_kernels", "dense_ffn", _VALUE,
        "passes(contribution(value, down_norms, n), thresholds.product)",
        "passes(value, thresholds.product)",
        ("test_dense_ffn::test_bits_with_thresholds_in_any_company_by_any_threads[0]",),
    ),
    Fault(
        "a-stream-begins-at-what-was-there",
        "numba_kernels", "float_ir", _OFF_BY_ONE,
        "index, first.equals(0)) for parity", "index, first.equals(1)) for parity",
        ("test_company::test_rows[numba-51-2848-numbers3-f16]",),
    ),
    Fault(
        "all-gates-come-with-their-rest",
        "numba_kernels", "arriving_gates", _CHECK,
        "if keeps_all or (is_listed and stored.options[READS_WHOLE]):",
        "if keeps_all or is_listed or stored.options[READS_WHOLE]:",
        ("test_gates_of_listed_neurons_come_first_and_then_the_rest_of_those_that_fire",),
    ),
    Fault(
        "late-gates-not-awaited",
        "numba_kernels", "arriving_gates", _CHECK,
        "is_late = atomic_load(held, row) != HERE", "is_late = False",
        ("test_a_disk_that_does_not_answer_is_waited_for",),
    ),
    Fault(
        "short-reads-of-a-ring-are-taken",
        "numba_kernels", "ring_reads", _CHECK,
        "is_whole = result == size", "is_whole = result != 0",
        ("test_a_file_that_is_spoilt_under_a_system[shorter-token]",),
    ),
    Fault(
        "a-broken-ring-is-waited-for",
        "numba_kernels", "ring_reads", _CHECK,
        "if status != 0:", "if status > 1000:",
        ("test_a_ring_that_breaks_is_done_without",),
    ),
    Fault(
        "slots-forget-who-was-wanted",
        "numba_kernels", "neuron_slots", _UPDATE,
        "used[slot], slot_weights[slot], places[i] = epoch, weights[row], slot",
        "used[slot], places[i] = epoch, slot",
        ("test_of_the_next_slots_the_neuron_leaves_that_is_wanted_least",),
    ),
    Fault(
        "neurons-of-this-layer-leave",
        "numba_kernels", "neuron_slots", _CHECK,
        "if slots.used[slot] == state[EPOCH] or (found >= 0", "if (found >= 0",
        ("test_of_the_next_slots_the_neuron_leaves_that_is_wanted_least",),
    ),
    Fault(
        "any-numba-is-as-tried",
        "numba_kernels", "numba_parts", _CHECK,
        "list(inspect.signature(found).parameters) == arguments.split()", "bool(found)",
        ("test_kernels_work_with_what_another_numba_has",),
    ),
    Fault(
        "later-numbas-are-as-tried",
        "numba_kernels", "numba_parts", _CHECK,
        "return is_known and has_cache_parts()", "return has_cache_parts()",
        ("test_kernels_work_with_what_another_numba_has[a later version]",),
    ),
]  # fmt: skip

_CUDA_KERNELS = [
    Fault(
        "heads-turn-the-wrong-way-on-a-gpu",
        "cuda_kernels", "rope", _SIGN,
        "a = a * cosine - b * sine;", "a = a * cosine + b * sine;",
        ("test_attention_step",),
    ),
    Fault(
        "threads-do-not-meet",
        "cuda_kernels", "norm", _LOCK,
        "sums[threadIdx.x / WARP] = value;\n    __syncthreads();",
        "sums[threadIdx.x / WARP] = value;",
        ("test_layer_norm",),
    ),
    Fault(
        "the-last-run-is-left-out",
        "cuda_kernels", "sum_parts", _OFF_BY_ONE,
        "i < WARPS && begin + i < num_runs; ++i", "i < WARPS && begin + i + 1 < num_runs; ++i",
        ("test_hot_ffn_of_many_parts",),
    ),
    Fault(
        "the-largest-but-for-its-sign",
        "cuda_kernels", "quantize", _SIGN,
        "largest = fabsf(value);", "largest = value;",
        ("test_quantized::test_rows_times_vectors",),
    ),
    Fault(
        "scratch-for-a-token-less",
        "cuda_kernels", "sizes", _OFF_BY_ONE,
        "return num_neurons * (num_tokens + 1) + num_parts",
        "return num_neurons * num_tokens + num_parts",
        ("test_scratch_is_enough_for_fewer_tokens_and_neurons",),
    ),
    Fault(
        "more-tokens-than-a-kernel-takes",
        "cuda_kernels", "kernels", _CHECK,
        "if not 0 < num_tokens <= MAX_TOKENS:", "if not 0 < num_tokens:",
        ("test_too_many_tokens_and_too_wide_heads_are_refused",),
    ),
    Fault(
        "pieces-of-odd-addresses",
        "cuda_kernels", "sizes", _CHECK,
        "return width % whole == 0 and not any(address % 16 for address in addresses)",
        "return width % whole == 0",
        ("test_pieces_that_are_not_aligned_give_the_same_bits",),
    ),
    Fault(
        "only-old-gpus",
        "cuda_kernels", "device", _SIGN,
        "if (major, minor) < _MIN_CAPABILITY:", "if (major, minor) > _MIN_CAPABILITY:",
        ("test_the_gpu_that_is_used",),
    ),
]  # fmt: skip

_MODEL = [
    Fault(
        "frequencies-that-cross",
        "model", "rope", _CHECK,
        "if high <= low:", "if high < 0:",
        ("test_contradictory_and_unsupported",),
    ),
    Fault(
        "positions-begin-a-row-too-early",
        "model", "families", _OFF_BY_ONE,
        '"position_offset": 2,', '"position_offset": 1,',
        ("test_reference::test_logits_equal_transformers",),
    ),
    Fault(
        "falcons-second-norm",
        "model", "families", _OFF_BY_ONE,
        "(grouped and num_norms == 2)", "(grouped and num_norms == 1)",
        ("test_falcon_layouts",),
    ),
    Fault(
        "a-key-given-twice",
        "model", "json_reader", _CHECK,
        "            if key in result:\n", "            if key in result and key is None:\n",
        ("test_a_key_given_twice_is_refused|test_config::test_damaged_file",),
    ),
    Fault(
        "tensors-that-overlap",
        "model", "safetensors_file", _CHECK,
        "if entry.start != position:", "if entry.start > position:",
        ("test_mis_declared_tensors",),
    ),
    Fault(
        "shards-in-other-folders",
        "model", "checkpoint", _CHECK,
        'if len(parts) != 1 or parts[0] in ("..", "/")', "if len(parts) < 1",
        ("test_bad_index",),
    ),
    Fault(
        "files-of-another-model",
        "model", "artifact", _CHECK,
        "if not is_own or content not in (None, self.content):",
        'if facts.get("model_digest") is None:',
        ("test_files_that_do_not_fit",),
    ),
    Fault(
        "parts-of-files-stay",
        "model", "whole_file", _UPDATE,
        "part.unlink(missing_ok=True)", "pass",
        ("test_a_full_disk_leaves_the_old_file",),
    ),
    Fault(
        "half-a-character-is-shown",
        "model", "tokenizer", _CHECK,
        "if not piece or piece.endswith(_INCOMPLETE):", "if not piece:",
        ("test_stream_of_half_a_character",),
    ),
    Fault(
        "text-is-shown-twice",
        "model", "tokenizer", _UPDATE,
        "        self._num_written = len(self._ids)\n        self.text += piece\n",
        "        self.text += piece\n",
        ("test_stream_is_the_decoded_text",),
    ),
    Fault(
        "up-is-gate",
        "model", "ffn", _INDEX,
        'reader.rows(f"{names.up}.weight"', 'reader.rows(f"{names.gate}.weight"',
        ("test_queries_of_a_prompt_attend_in_parts",),
        (
            'reader.rows(f"{prefix}{names.up}.weight"',
            'reader.rows(f"{prefix}{names.gate}.weight"',
        ),
    ),
    Fault(
        "an-id-beyond-the-vocabulary",
        "model", "embedding", _OFF_BY_ONE,
        "values.max() >= size", "values.max() > size",
        ("test_embedding_is_mapped_and_looked_up",),
    ),
    Fault(
        "keys-without-values",
        "model", "sizes", _VALUE,
        "per_token = 2 * config.num_layers", "per_token = config.num_layers",
        ("test_sizes_known_before_loading",),
    ),
    Fault(
        "end-tokens-of-config-json-alone",
        "model", "sampling", _UPDATE,
        'return reader.token_ids("eos_token_id", (), config.vocab_size)',
        "return config.eos_token_ids",
        ("test_end_tokens",),
    ),
    Fault(
        "neurons-of-powerinfer-as-outputs",
        "model", "down_outputs", _CHECK,
        "is_blocks(checkpoint.dtype(name)) and not checkpoint.is_by_neurons(name)",
        "is_blocks(checkpoint.dtype(name))",
        ("test_quantized_rows_by_neurons_keep_their_numbers",),
    ),
    Fault(
        "squares-for-lengths-of-down-rows",
        "model", "down_outputs", _VALUE,
        "lengths.append(np.sqrt(squares))", "lengths.append(squares)",
        ("test_thresholds_beside_rows_of_outputs",),
    ),
]  # fmt: skip

_PLACEMENT = [
    Fault(
        "the-coldest-are-hot",
        "placement", "hottest", _SIGN,
        "-scores.ravel()", "scores.ravel()",
        ("test_hottest_neurons",),
    ),
    Fault(
        "groups-where-there-is-no-room",
        "placement", "greedy", _CHECK,
        "if group_bytes[group] <= free]", "if free > 0]",
        ("test_every_placement_keeps_the_rules",),
    ),
    Fault(
        "what-a-gpu-saves",
        "placement", "cost", _SIGN,
        "cpu_s[:, None] - mean[:, :num_gpus]", "cpu_s[:, None] + mean[:, :num_gpus]",
        ("test_least_neurons_against_a_search",),
    ),
    Fault(
        "rows-of-a-neuron",
        "placement", "cost", _VALUE,
        "first if config.has_gate else 0", "0 if config.has_gate else first",
        ("test_seconds_of_a_neuron",),
    ),
    Fault(
        "a-part-on-a-cpu-column",
        "placement", "plan", _OFF_BY_ONE,
        "parts.max() >= plan.num_gpus", "parts.max() > plan.num_gpus",
        ("test_a_part_on_no_gpu_is_refused",),
    ),
    Fault(
        "a-plan-for-other-options",
        "placement", "plan", _CHECK,
        "    if different:\n", "    if different and not plan.device_names:\n",
        ("test_other_plans_are_refused",),
    ),
    Fault(
        "more-memory-than-allowed",
        "placement", "memory", _VALUE,
        "free = min(free, budget_bytes)", "free = max(free, budget_bytes)",
        ("test_the_dtype_that_fits",),
    ),
    Fault(
        "threads-to-the-busiest",
        "placement", "numa", _VALUE,
        "loads.index(min(loads))", "loads.index(max(loads))",
        ("test_a_system_follows_the_tree",),
    ),
    Fault(
        "the-farthest-node",
        "placement", "numa", _VALUE,
        "return min(sorted(homes), key=", "return max(sorted(homes), key=",
        ("test_cores_without_memory_go_to_the_nearest_node",),
    ),
    Fault(
        "pauses-that-do-not-grow",
        "placement", "core_keeper", _INDEX,
        "longer if soon else _FIRST_PAUSE_S", "_FIRST_PAUSE_S if soon else longer",
        ("test_the_pauses_grow_while_trouble_stays_and_begin_anew_after_it",),
    ),
    Fault(
        "the-last-core-of-a-range",
        "model", "limits", _OFF_BY_ONE,
        "int(last or first) + 1", "int(last or first)",
        ("test_core_lists",),
    ),
    Fault(
        "memory-elsewhere-is-near",
        "placement", "locality", _SIGN,
        "if node not in self.nodes)", "if node in self.nodes)",
        ("test_doctor_names_memory_elsewhere",),
    ),
    Fault(
        "every-second-page-is-touched",
        "placement", "first_touch", _VALUE,
        "items[start::_PAGE_BYTES] = 0", "items[start :: 2 * _PAGE_BYTES] = 0",
        ("test_first_touch_takes_every_page_and_changes_nothing",),
    ),
    Fault(
        "a-digest-of-what-is-free",
        "placement", "description", _UPDATE,
        'del device["free_bytes"]', "pass",
        ("test_the_digest_leaves_out_what_changes_by_itself",),
    ),
]  # fmt: skip

_PREDICTORS = [
    Fault(
        "estimates-that-say-the-contrary",
        "predictors", "thresholds", _CHECK,
        "torch.where(variance > _TINY, slope, 0).clamp_min(0)",
        "torch.where(variance > _TINY, slope, 0)",
        ("test_estimates_that_say_the_contrary_are_as_good_as_none",),
    ),
    Fault(
        "the-other-quantile",
        "predictors", "thresholds", _VALUE,
        "rank = int((1 - target_recall)", "rank = int(target_recall",
        ("test_least_margin_is_that_quantile",),
    ),
    Fault(
        "a-shift-of-the-other-sign",
        "predictors", "thresholds", _SIGN,
        "(least_margin * self.noise - self.shift) / self.slope",
        "(least_margin * self.noise + self.shift) / self.slope",
        ("test_as_few_neurons_as_one_who_knows",),
    ),
    Fault(
        "recall-is-precision",
        "predictors", "quality", _INDEX,
        "recall=both / num_fires if", "recall=both / num_computed if",
        ("test_quality_by_hand",),
    ),
    Fault(
        "columns-in-another-order",
        "predictors", "lowrank", _ORDER,
        "np.ascontiguousarray(self.up[:, neuron_ids])",
        "np.ascontiguousarray(self.up[:, np.sort(neuron_ids)])",
        ("test_arranged_for_shards_the_choice_is_the_same",),
    ),
    Fault(
        "predictors-of-a-deeper-model",
        "predictors", "powerinfer", _CHECK,
        "if beyond.exists():", "if not beyond.parent.exists():",
        ("test_folders_of_another_model",),
    ),
    Fault(
        "the-gates-bias-is-taken-off",
        "predictors", "layer_data", _SIGN,
        "rows, z + torch.from_numpy(bias)", "rows, z - torch.from_numpy(bias)",
        ("test_layer_data_is_what_the_checkpoint_says",),
    ),
    Fault(
        "scores-of-another-layer",
        "numba_kernels", "predict_team", _CHECK,
        "or task[LAYER] != layer or task", "or task",
        ("test_what_was_not_announced_is_not_scored",),
    ),
    Fault(
        "a-nan-among-thresholds",
        "predictors", "predictor_file", _CHECK,
        "if dtype is np.float32 and np.isnan(array).any():", "if array.ndim == 0:",
        ("test_files_that_make_no_sense_are_refused",),
    ),
]  # fmt: skip

_JOBS = [
    Fault(
        "a-window-is-left-out",
        "jobs", "text_file", _OFF_BY_ONE,
        "for first in range(0, num_ids, size)]", "for first in range(0, num_ids - 1, size)]",
        ("test_text_file::test_windows",),
    ),
    Fault(
        "cut-before-a-lines-end",
        "jobs", "text_file", _OFF_BY_ONE,
        "last = found + 1", "last = found",
        ("test_where_a_text_is_cut",),
    ),
    Fault(
        "a-document-opens-with-bos",
        "jobs", "text_file", _CHECK,
        "start = 1 if bos is not None and ids[:1] == [bos] else 0", "start = 0",
        ("test_text_file::test_json_lines",),
    ),
    Fault(
        "any-key-will-do",
        "jobs", "request_lines", _CHECK,
        "if unknown := sorted(set(values) - set(_KEYS)):",
        "if unknown := sorted(set(values) - set(values)):",
        ("test_job_files::test_bad_requests",),
    ),
    Fault(
        "a-line-cut-off-is-an-answer",
        "jobs", "answer_file", _UPDATE,
        "self._keep_bytes += len(line)", "self._keep_bytes = len(line)",
        ("test_answers_are_kept_only_to_resume",),
    ),
    Fault(
        "held-out-text-is-trained-on",
        "jobs", "corpus", _CHECK,
        "training = (entry for entry in entries if entry.module not in HELD_OUT_MODULES)",
        "training = (entry for entry in entries)",
        ("test_held_out_modules_are_absent_from_training",),
    ),
    Fault(
        "an-interrupt-is-a-defect",
        "jobs", "cli", _VALUE,
        'return "", EXIT_INTERRUPTED', 'return "", EXIT_FAILURE',
        ("test_interrupt_is_quiet",),
    ),
    Fault(
        "inputs-recorded-twice",
        "jobs", "state", _OFF_BY_ONE,
        "if bounds[i + 1] > bounds[i]]", "if bounds[i + 1] >= bounds[i]]",
        ("test_which_inputs_are_recorded|test_files_are_what_transformers_says",),
    ),
    Fault(
        "decimal-sizes-are-binary",
        "jobs", "options", _INDEX,
        'base = 1024 if unit.endswith("i") else 1000',
        'base = 1000 if unit.endswith("i") else 1024',
        ("test_sizes_of_the_command_line",),
    ),
    Fault(
        "half-of-the-cost-for-rows-that-are-read",
        "jobs", "calibration", _VALUE,
        "1.0 if served.reads_all_down else served.up / served.rest", "served.up / served.rest",
        ("test_where_all_of_down_is_read_its_threshold_costs_nothing",),
    ),
]  # fmt: skip

_UI = [
    Fault(
        "any-host-name-is-answered",
        "ui", "gate", _CHECK,
        'if self._local and _name_of(headers.get("host", "")) not in _LOCAL_NAMES:',
        'if self._local and not headers.get("host", ""):',
        ("test_gate::test_other_names_are_not",),
    ),
    Fault(
        "pages-of-others-may-ask",
        "ui", "gate", _SIGN,
        "if (self._local or by_password) and _is_of_another_page(method, headers):",
        "if not (self._local or by_password) and _is_of_another_page(method, headers):",
        ("test_pages_of_others_are_refused",),
        before=(
            "if origin is not None and (self._local or by_password):",
            "if origin is not None and not (self._local or by_password):",
        ),
    ),
    Fault(
        "only-the-last-piece-of-a-body-counts",
        "ui", "gate", _UPDATE,
        'self._num_bytes += len(message.get("body") or b"")',
        'self._num_bytes = len(message.get("body") or b"")',
        ("test_bodies_are_limited_with_and_without_a_length",),
    ),
    Fault(
        "any-key-opens",
        "ui", "gate", _CHECK,
        "if not is_key or not self._keys.is_right(given, address):",
        "if not is_key:",
        ("test_gate::test_keys",),
        before=(
            'if kind.lower() not in ("bearer", "basic") or not any(known):',
            'if kind.lower() not in ("bearer", "basic"):',
        ),
    ),
    Fault(
        "too-long-a-prompt-is-a-bad-one",
        "ui", "errors", _VALUE,
        'param="prompt", code="context_length_exceeded"', 'param="prompt"',
        ("test_errors_are_told_as_openai_does",),
    ),
    Fault(
        "the-queue-has-no-end",
        "ui", "backend", _CHECK,
        "if self.num_active + min(count, self.num_parallel) > self.capacity:",
        "if self.num_active > self.capacity:",
        ("test_those_who_run_and_wait_leave_less_room|test_more_than_the_queue_takes_is_refused",),
        before=(
            "if self.num_active + len(requests) > self.capacity:",
            "if self.num_active > self.capacity:",
        ),
    ),
    Fault(
        "only-the-last-text-stays",
        "ui", "answer", _UPDATE,
        "self.text += event.text", "self.text = event.text",
        ("test_an_answer_is_put_together",),
    ),
    Fault(
        "answers-open-a-conversation",
        "ui", "conversations", _INDEX,
        'role != ("user", "assistant")[i % 2]', 'role not in ("user", "assistant")',
        ("test_conversations::test_what_is_malformed_is_left_out",),
    ),
    Fault(
        "an-event-has-no-end",
        "ui", "sse", _OFF_BY_ONE,
        r'data: {text}\n\n".encode()', r'data: {text}\n".encode()',
        ("test_an_event_is_one_line_whatever_it_holds",),
    ),
    Fault(
        "every-list-has-one-number",
        "ui", "conversation_list", _UPDATE,
        '"at": next(_numbers)', '"at": 1',
        ("test_conversation_list::test_what_is_unknown_changes_nothing[done0]",),
    ),
    Fault(
        "numbers-of-another-server-count",
        "ui", "list", _CHECK,
        "value.server === newest.server && value.at", "value.at",
        ("test_another_servers_values_are_taken_whatever_their_numbers",),
    ),
    Fault(
        "older-lists-are-shown",
        "ui", "list", _CHECK,
        "if (isOld(props.value)) return;", "",
        ("test_an_older_value_that_comes_later_is_dropped",),
    ),
]  # fmt: skip

FAULTS = [
    *_ACTORS,
    *_NUMBA_KERNELS,
    *_CUDA_KERNELS,
    *_MODEL,
    *_PLACEMENT,
    *_PREDICTORS,
    *_JOBS,
    *_UI,
]
