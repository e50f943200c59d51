"""Triton kernels over rows of logits: their statistics, and a rule's rewriting of a row and its draft row.

A row is split into blocks, because a step has few rows (8 to 512) and a GPU more multiprocessors. Each kernel writes a block's
partial results, and the next one adds them up in a fixed order: no atomics, so equal inputs give equal bits. Nothing is copied to
the host.

The pairs written are those of the rules on an engine that normalises both rows (Model Runner V2; rules.md, 2.3):

* accept x for certain: its target logit is raised until p'(x) = 1; q' stays, and no ratio is below any coin;
* Cactus: its target logit alone changes, and softmax scales the others;
* q' = e_x: the draft logit of x is raised until q'(x) = 1, exact in any precision of the draft's logits;
* a rule with a residual of its own (lenience, interpolation, token cascades): the target row is written in whole.

A token the target forbids (-inf) has p' = 0 in every pair, to the bit: where p' and q' are equal in the reals, their rounded
difference may be positive, and vLLM would draw from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from agentguard.row_flags import RowFlag
from engine_plugins.kernels import table
from engine_plugins.kernels.batch import FAR, FORCED_LOGIT, ONE_HOT, RELAX, STATS, WANT_DRAFT
from engine_plugins.kernels.jit import kernel

PARTIALS = 8
SUMS = 4

_PARTIALS: tl.constexpr = tl.constexpr(PARTIALS)
_STATS: tl.constexpr = tl.constexpr(STATS)
_SUMS: tl.constexpr = tl.constexpr(SUMS)
_WIDTH: tl.constexpr = tl.constexpr(table.WIDTH)
_LENIENCE: tl.constexpr = tl.constexpr(table.LENIENCE)
_CACTUS: tl.constexpr = tl.constexpr(table.CACTUS)
_INTERP: tl.constexpr = tl.constexpr(table.INTERP)
_TYPICAL: tl.constexpr = tl.constexpr(table.TYPICAL)
_FUZZY: tl.constexpr = tl.constexpr(table.FUZZY)
_R_FUZZY: tl.constexpr = tl.constexpr(table.R_FUZZY)
_CHOW: tl.constexpr = tl.constexpr(table.CHOW)
_DIFF: tl.constexpr = tl.constexpr(table.DIFF)
_OPT: tl.constexpr = tl.constexpr(table.OPT)
_TOK_V1: tl.constexpr = tl.constexpr(table.TOK_V1)
_TOK_V2: tl.constexpr = tl.constexpr(table.TOK_V2)
_RELAXED: tl.constexpr = tl.constexpr(int(RowFlag.RELAXED))
_LOW_SUPPORT: tl.constexpr = tl.constexpr(int(RowFlag.LOW_SUPPORT))
_FORCED: tl.constexpr = tl.constexpr(int(RowFlag.FORCED))
_MASKED: tl.constexpr = tl.constexpr(int(RowFlag.MASKED))
_END_OF_THINK: tl.constexpr = tl.constexpr(int(RowFlag.END_OF_THINK))
_GREEDY: tl.constexpr = tl.constexpr(int(RowFlag.GREEDY))
_UNSURE: tl.constexpr = tl.constexpr(int(RowFlag.UNSURE))
_FORCED_LOGIT: tl.constexpr = tl.constexpr(FORCED_LOGIT)
_NEGATIVE: tl.constexpr = tl.constexpr(float("-inf"))
_FAR: tl.constexpr = tl.constexpr(FAR)
_ONE_HOT: tl.constexpr = tl.constexpr(ONE_HOT)
_OTHER: tl.constexpr = tl.constexpr(table.OTHER)
_WANT_DRAFT: tl.constexpr = tl.constexpr(WANT_DRAFT)
_RELAX: tl.constexpr = tl.constexpr(RELAX)


@kernel
def partials_kernel(
    part_ptr, target_ptr, target_stride, draft_ptr, draft_stride_0, draft_stride_1, x_ptr, want_ptr, slot_ptr, step_ptr,
    temperature_ptr, vocab, blocks, BLOCK: tl.constexpr, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """Of each block of a row: maximum, where it is, sum of exponentials, their entropy sum, tokens above x, allowed tokens; of its
    draft row: maximum and sum. part: [rows, blocks, 8] float32."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    want = tl.load(want_ptr + row)
    if want != 0:
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < vocab
        logits = tl.load(target_ptr + row * target_stride + at, mask=inside, other=_NEGATIVE).to(tl.float32)
        x = tl.maximum(tl.load(x_ptr + row), 0)
        lx = tl.load(target_ptr + row * target_stride + x).to(tl.float32)
        top = tl.max(logits, axis=0)
        base = tl.where(top == _NEGATIVE, 0.0, top)
        relative = tl.where(logits > _NEGATIVE, logits - base, 0.0)
        weights = tl.where(logits > _NEGATIVE, tl.exp(relative), 0.0)
        first = tl.min(tl.where((logits == top) & inside, at, vocab), axis=0)
        out = part_ptr + (row * blocks + block) * _PARTIALS
        tl.store(out, top)
        tl.store(out + 1, first.to(tl.float32))
        tl.store(out + 2, tl.sum(weights, axis=0))
        tl.store(out + 3, tl.sum(weights * relative, axis=0))
        tl.store(out + 4, tl.sum((logits > lx).to(tl.int32), axis=0).to(tl.float32))
        tl.store(out + 5, tl.sum((logits > _NEGATIVE).to(tl.int32), axis=0).to(tl.float32))
        if HAS_DRAFT:
            if (want & _WANT_DRAFT) != 0:
                slot = tl.load(slot_ptr + row).to(tl.int64)
                step = tl.load(step_ptr + row)
                heat = tl.load(temperature_ptr + slot).to(tl.float32)
                heat = tl.where(heat == 0.0, 1.0, heat)
                start = draft_ptr + slot * draft_stride_0 + step * draft_stride_1
                draft = tl.load(start + at, mask=inside, other=_NEGATIVE).to(tl.float32) / heat
                top = tl.max(draft, axis=0)
                base = tl.where(top == _NEGATIVE, 0.0, top)
                tl.store(out + 6, top)
                tl.store(out + 7, tl.sum(tl.where(draft > _NEGATIVE, tl.exp(draft - base), 0.0), axis=0))


@kernel
def tops_kernel(
    top_ptr, draft_ptr, draft_stride_0, draft_stride_1, slot_ptr, step_ptr, vocab, blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each block of the draft row that a row's own token was drawn from: the largest logit, +inf where one is no number. A row
    of step 0 has no such token and is not read. top: [rows, blocks] float32."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    step = tl.load(step_ptr + row)
    top = 0.0
    if step > 0:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        at = block * BLOCK + tl.arange(0, BLOCK)
        start = draft_ptr + slot * draft_stride_0 + (step - 1) * draft_stride_1
        draft = tl.load(start + at, mask=at < vocab, other=_NEGATIVE).to(tl.float32)
        top = tl.max(tl.where(draft == draft, draft, float("inf")), axis=0)
    tl.store(top_ptr + row * blocks + block, top)


@kernel
def decide_kernel(
    stats_ptr, verdict_ptr, part_ptr, target_ptr, target_stride, draft_ptr, draft_stride_0, draft_stride_1, x_ptr, want_ptr,
    flags_ptr, slot_ptr, step_ptr, temperature_ptr, rule_ptr, end, blocks, BLOCKS: tl.constexpr, HAS_DRAFT: tl.constexpr,
    HAS_RULES: tl.constexpr,
):  # fmt: skip
    """Add up the partials of a row, and say whether its rule may judge it. stats: [rows, 16] float32; verdict: [rows] int32."""
    row = tl.program_id(0).to(tl.int64)
    want = tl.load(want_ptr + row)
    flags = tl.load(flags_ptr + row)
    verdict = 0
    out = stats_ptr + row * _STATS
    x = tl.load(x_ptr + row)
    if want != 0:
        slot = tl.load(slot_ptr + row).to(tl.int64)
        lane = tl.arange(0, BLOCKS)
        mine = lane < blocks
        part = part_ptr + (row * blocks + lane) * _PARTIALS
        tops = tl.load(part, mask=mine, other=_NEGATIVE)
        top = tl.max(tops, axis=0)
        first = tl.load(part + 1, mask=mine, other=0.0)
        argmax = tl.min(tl.where(mine & (tops == top), first, 3.4e38), axis=0)
        sums = tl.load(part + 2, mask=mine, other=0.0)
        below = tl.where(sums > 0, tops - top, 0.0)
        scale = tl.where(sums > 0, tl.exp(below), 0.0)
        z = tl.sum(sums * scale, axis=0)
        spread = tl.sum(scale * (tl.load(part + 3, mask=mine, other=0.0) + sums * below), axis=0)
        log_z = tl.log(z)
        entropy = log_z - spread / z
        rank = tl.sum(tl.load(part + 4, mask=mine, other=0.0), axis=0)
        allowed = tl.sum(tl.load(part + 5, mask=mine, other=0.0), axis=0)
        lx = tl.load(target_ptr + row * target_stride + tl.maximum(x, 0)).to(tl.float32)
        px = tl.where(x >= 0, tl.exp((lx - top) - log_z), 0.0)
        closing = _NEGATIVE
        ending = -1.0
        if end >= 0:
            closing = tl.load(target_ptr + row * target_stride + end).to(tl.float32)
            ending = tl.exp((closing - top) - log_z)
        qx = -1.0
        strict = px
        d_top = 0.0
        d_log_z = 0.0
        if HAS_DRAFT:
            if (want & _WANT_DRAFT) != 0:
                d_tops = tl.load(part + 6, mask=mine, other=_NEGATIVE)
                d_top = tl.max(d_tops, axis=0)
                d_sums = tl.load(part + 7, mask=mine, other=0.0)
                d_log_z = tl.log(tl.sum(tl.where(d_sums > 0, d_sums * tl.exp(d_tops - d_top), 0.0), axis=0))
                heat = tl.load(temperature_ptr + slot).to(tl.float32)
                heat = tl.where(heat == 0.0, 1.0, heat)
                at = slot * draft_stride_0 + tl.load(step_ptr + row) * draft_stride_1 + tl.maximum(x, 0)
                dx = tl.load(draft_ptr + at).to(tl.float32) / heat
                qx = tl.exp((dx - d_top) - d_log_z)
                strict = tl.where(qx > 0, tl.minimum(px / tl.where(qx > 0, qx, 1.0), 1.0), 0.0)
        if (flags & _GREEDY) != 0:
            strict = tl.where(rank == 0, 1.0, 0.0)
        strict = tl.where(x >= 0, strict, 0.0)
        forced = top >= _FORCED_LOGIT
        if forced:
            flags |= _FORCED
        if (x < 0) | (lx == _NEGATIVE):
            flags |= _MASKED
        if (closing >= top) & (end >= 0) & (forced == 0):
            flags |= _END_OF_THINK
        if HAS_RULES:
            if ((want & _RELAX) != 0) & (flags == 0):
                rule = rule_ptr + slot * _WIDTH
                p_min = tl.load(rule + 3)
                top_k = tl.load(rule + 4)
                if entropy > tl.load(rule + 5):
                    flags |= _UNSURE
                else:
                    outside = (px < p_min) | ((top_k > 0) & (rank >= top_k))
                    # p_min = 1 and a rounded p(x): nothing could take its place
                    outside = outside & ((px <= 0.999) | (allowed > 1))
                    verdict = tl.where(outside, 2, 1)
                    flags |= _RELAXED
                    if outside:
                        flags |= _LOW_SUPPORT
        tl.store(out, top)
        tl.store(out + 1, log_z)
        tl.store(out + 2, lx)
        tl.store(out + 3, rank)
        tl.store(out + 4, argmax)
        tl.store(out + 5, entropy)
        tl.store(out + 6, allowed)
        tl.store(out + 7, px)
        tl.store(out + 8, d_top)
        tl.store(out + 9, d_log_z)
        tl.store(out + 10, qx)
        tl.store(out + 11, ending)
        tl.store(out + 12, strict)
    tl.store(out + 14, x.to(tl.float32))
    tl.store(out + 15, flags.to(tl.float32))
    tl.store(verdict_ptr + row, verdict)


@triton.jit
def _needs_sums(code, verdict, px, qx, k0):
    """Does this row's decision need the sums of the second pass?"""
    lenient = (code == _LENIENCE) & (verdict == 1) & (px < k0 * qx)
    mixed = (code == _INTERP) & (verdict == 1) & (px < qx) & (k0 < 1.0)
    trusting = (code >= _FUZZY) & (code != _CHOW) & (code != _DIFF) & (code != _OTHER)
    removed = (verdict == 2) & ((code == _CHOW) | (code == _DIFF) | (code == _INTERP))
    return lenient | mixed | (code == _TYPICAL) | trusting | removed


@triton.jit
def _in_set(code, p, q, p_max, alpha):
    """A of the token cascades, one comparison for all three as ``code`` is known at run time alone; of tokens that are allowed."""
    value = tl.where(code == _TOK_V1, q, p)
    least = tl.where(code > _TOK_V2, (1.0 - alpha) * p_max, p_max - alpha)
    # alpha < 0 trusts nothing under V2 and V3, also where 1 - alpha rounds to 1
    return value >= tl.where((code > _TOK_V1) & (alpha < 0), 2.0, least)


@kernel
def sums_kernel(
    sums_ptr, verdict_ptr, stats_ptr, target_ptr, target_stride, draft_ptr, draft_stride_0, draft_stride_1, x_ptr, slot_ptr,
    step_ptr, temperature_ptr, rule_ptr, vocab, blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each block: the rule's own sum, the draft's mass that may take x's place, and how many tokens are trusted. sums: [rows,
    blocks, 4] float32."""
    row = tl.program_id(0).to(tl.int64)
    verdict = tl.load(verdict_ptr + row)
    if verdict != 0:
        block = tl.program_id(1)
        slot = tl.load(slot_ptr + row).to(tl.int64)
        code = tl.load(rule_ptr + slot * _WIDTH).to(tl.int32)
        k0 = tl.load(rule_ptr + slot * _WIDTH + 1)
        stats = stats_ptr + row * _STATS
        top = tl.load(stats)
        log_z = tl.load(stats + 1)
        if _needs_sums(code, verdict, tl.load(stats + 7), tl.load(stats + 10), k0):
            at = block * BLOCK + tl.arange(0, BLOCK)
            inside = at < vocab
            logits = tl.load(target_ptr + row * target_stride + at, mask=inside, other=_NEGATIVE).to(tl.float32)
            p = tl.exp((logits - top) - log_z)
            main = 0.0
            left = 0.0
            count = 0.0
            if code == _TYPICAL:
                main = tl.sum(tl.where(p > 0, p * tl.log(p + 1e-5), 0.0), axis=0)
            else:
                heat = tl.load(temperature_ptr + slot).to(tl.float32)
                start = draft_ptr + slot * draft_stride_0 + tl.load(step_ptr + row) * draft_stride_1
                draft = tl.load(start + at, mask=inside, other=_NEGATIVE).to(tl.float32) / heat
                q = tl.exp((draft - tl.load(stats + 8)) - tl.load(stats + 9))
                free = (at != tl.load(x_ptr + row)) & (logits > _NEGATIVE)
                if code >= _TOK_V1:
                    trusted = _in_set(code, p, q, tl.exp(0.0 - log_z), k0) & (logits > _NEGATIVE)
                    main = tl.sum(tl.where(trusted, q, 0.0), axis=0)
                    left = tl.sum(tl.where(trusted & free, q, 0.0), axis=0)
                    count = tl.sum(trusted.to(tl.int32), axis=0).to(tl.float32)
                else:
                    left = tl.sum(tl.where(free, q, 0.0), axis=0)
                    if (code == _LENIENCE) | (code == _OPT) | (code == _INTERP):
                        main = tl.sum(tl.maximum(p - q, 0.0), axis=0)
                    elif (code == _FUZZY) | (code == _R_FUZZY):
                        m = (p + q) * 0.5
                        of_p = tl.where(p > 0, p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)
                        of_q = tl.where(q > 0, q * tl.log(tl.where(q > 0, q, 1.0)), 0.0)
                        of_m = tl.where(m > 0, m * tl.log(tl.where(m > 0, m, 1.0)), 0.0)
                        main = tl.sum((of_p + of_q) * 0.5 - of_m, axis=0)
            out = sums_ptr + (row * blocks + block) * _SUMS
            tl.store(out, main)
            tl.store(out + 1, left)
            tl.store(out + 2, count)


@kernel
def write_kernel(
    sums_ptr, verdict_ptr, stats_ptr, target_ptr, target_stride, draft_ptr, draft_stride_0, draft_stride_1, x_ptr, slot_ptr,
    step_ptr, temperature_ptr, rule_ptr, vocab, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HAS_SUMS: tl.constexpr,
):  # fmt: skip
    """Write the rule's pair. Every block of a row comes to the same decision and writes what lies in it."""
    row = tl.program_id(0).to(tl.int64)
    verdict = tl.load(verdict_ptr + row)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    rule = rule_ptr + slot * _WIDTH
    code = tl.load(rule).to(tl.int32)
    if (verdict != 0) & (code != _OTHER):
        block = tl.program_id(1)
        k0 = tl.load(rule + 1)
        k1 = tl.load(rule + 2)
        stats = stats_ptr + row * _STATS
        top = tl.load(stats)
        log_z = tl.load(stats + 1)
        argmax = tl.load(stats + 4).to(tl.int32)
        px = tl.load(stats + 7)
        d_top = tl.load(stats + 8)
        d_log_z = tl.load(stats + 9)
        qx = tl.load(stats + 10)
        x = tl.load(x_ptr + row)
        main = 0.0
        left = 0.0
        count = 0.0
        if HAS_SUMS:
            if _needs_sums(code, verdict, px, qx, k0):
                lane = tl.arange(0, BLOCKS)
                part = sums_ptr + (row * blocks + lane) * _SUMS
                main = tl.sum(tl.load(part, mask=lane < blocks, other=0.0), axis=0)
                left = tl.sum(tl.load(part + 1, mask=lane < blocks, other=0.0), axis=0)
                count = tl.sum(tl.load(part + 2, mask=lane < blocks, other=0.0), axis=0)

        # what is done: certain accepts x; lx is its new logit; best makes the argmax the whole row; one_hot sets q' = e_x; whole: 1
        # x with its acceptance beside the stock residual, 2 the draft without x, 3 the mixture without x, 4 the token cascade
        certain = False
        change = False
        lx = _NEGATIVE
        best = False
        one_hot = False
        whole = 0
        if code == _CACTUS:
            variance = tl.maximum(px * (1.0 - px), 0.0)
            g = px
            if variance > 0:
                g = tl.minimum(px + tl.sqrt(2.0 * k0 * variance), 1.0)
            if g > px:
                certain = g >= 1.0
                change = g < 1.0
                safe = tl.minimum(g, 0.99999994)
                lx = tl.log(g) - tl.log(1.0 - safe) + (top + log_z) + tl.log(1.0 - px)
        elif code == _LENIENCE:
            if px < qx:
                certain = px >= k0 * qx
                whole = tl.where(px >= k0 * qx, 0, 1)
        elif code == _INTERP:
            if px < qx:
                certain = k0 >= 1.0
                whole = tl.where(k0 >= 1.0, 0, 1)
        elif code == _TYPICAL:
            threshold = tl.minimum(k1 * tl.exp(main), k0)
            certain = (px > threshold) | (argmax == x)
            change = certain == 0
            best = certain == 0
        elif code >= _TOK_V1:
            trusts = _in_set(code, px, qx, tl.exp(0.0 - log_z), k0)
            certain = trusts
            whole = tl.where(trusts | (count == 0), 0, 4)
        elif code >= _FUZZY:
            p_max = tl.exp(0.0 - log_z)
            q_max = tl.exp(0.0 - d_log_z)
            near = (code == _FUZZY) & (tl.maximum(main, 0.0) <= k0)
            near = near | ((code == _R_FUZZY) & (tl.maximum(main, 0.0) < k0))
            near = near | ((code == _CHOW) & (q_max >= 1.0 - k0))
            near = near | ((code == _DIFF) & (q_max >= p_max - k0))
            bar = 0.0
            if main > 0:
                bar = k0 * main
            near = near | ((code == _OPT) & (q_max >= p_max - bar))
            certain = near
            one_hot = (code == _FUZZY) & (near == 0)
        if verdict == 2:
            # x is out: what the rule would have put in its place, without it
            taken = certain
            certain = False
            change = True
            lx = _NEGATIVE
            one_hot = False
            best = False
            whole = 0
            if code == _INTERP:
                # at w = 1 what is left is the draft, and a residual of two nearly equal rows would lose it
                whole = tl.where(k0 < 1.0, 3, tl.where(left > 0, 2, 0))
                one_hot = (k0 >= 1.0) & (left > 0)
            elif code == _TYPICAL:
                threshold = tl.minimum(k1 * tl.exp(main), k0)
                best = (px <= threshold) & (argmax != x)
                one_hot = (px <= threshold) & (argmax == x)
            elif code >= _TOK_V1:
                whole = tl.where((count > 0) & ((left > 0) | (main < 1.0)), 4, 0)
            elif code >= _FUZZY:
                whole = tl.where(taken & (left > 0), 2, 0)
                one_hot = (taken & (left > 0)) | ((code == _FUZZY) & (taken == 0))
        if whole == 1:
            one_hot = True

        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < vocab
        here = target_ptr + row * target_stride + at
        start = draft_ptr + slot * draft_stride_0 + tl.load(step_ptr + row) * draft_stride_1
        if whole != 0:
            heat = tl.load(temperature_ptr + slot).to(tl.float32)
            logits = tl.load(here, mask=inside, other=_NEGATIVE).to(tl.float32)
            draft = tl.load(start + at, mask=inside, other=_NEGATIVE).to(tl.float32) / heat
            p = tl.exp((logits - top) - log_z)
            q = tl.exp((draft - d_top) - d_log_z)
            new = q
            if whole == 1:
                a = tl.where(code == _INTERP, k0 + (1.0 - k0) * (px / qx), px / (k0 * qx))
                rest = tl.where(main > 0, tl.maximum(p - q, 0.0) / tl.where(main > 0, main, 1.0), p)
                new = tl.where(at == x, a, (1.0 - a) * rest)
            elif whole == 3:
                new = k0 * q + (1.0 - k0) * p
            elif whole == 4:
                trusted = _in_set(code, p, q, tl.exp(0.0 - log_z), k0) & (logits > _NEGATIVE)
                new = tl.where(trusted, q, 0.0) + tl.maximum(1.0 - main, 0.0) * p
            if verdict == 2:
                new = tl.where((logits > _NEGATIVE) & (at != x), new, 0.0)
            tl.store(here, tl.where(new > 0, tl.log(tl.where(new > 0, new, 1.0)), _NEGATIVE), mask=inside)
        else:
            if certain | change:
                tl.store(here, tl.where(certain, top + _FAR, lx) + tl.zeros_like(at).to(tl.float32), mask=inside & (at == x))
            if best:
                tl.store(here, top + _FAR + tl.zeros_like(at).to(tl.float32), mask=inside & (at == argmax))
        if one_hot & (block == 0):
            tl.store(start + x, _ONE_HOT)


@kernel
def layout_kernel(
    x_ptr, want_ptr, flags_ptr, ends_ptr, slots_ptr, drafted_ptr, temperature_ptr, rule_ptr, inside_ptr, listened, has_draft,
):  # fmt: skip
    """Rows of a batch as Model Runner V2 lays them out: row j of a request is verified against the token of row j + 1, its last row
    is the bonus. x: [rows] int64, -1 where no token is verified; want: what a row needs; flags: [rows] int32 of RowFlag."""
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    start = tl.load(ends_ptr + request)
    last = tl.load(ends_ptr + request + 1) - 1
    code = tl.load(rule_ptr + slot * _WIDTH)
    phase = tl.load(rule_ptr + slot * _WIDTH + 6)
    reads = tl.load(rule_ptr + slot * _WIDTH + 7)
    greedy = tl.load(temperature_ptr + slot) == 0.0
    for row in range(start, last):
        x = tl.load(drafted_ptr + row + 1).to(tl.int64)
        flags = tl.where(greedy, _GREEDY, 0) + tl.where(x < 0, _MASKED, 0)
        thinks = tl.load(inside_ptr + row)  # 1 inside the think block, 0 outside, -1 unknown
        asked = (phase == 0) | ((phase == 1) & (thinks == 1)) | ((phase == 2) & (thinks == 0))
        relax = (code > 0) & asked & (flags == 0) & (has_draft != 0)
        want = tl.where(relax, _RELAX + 1, 0) + tl.where(relax & (reads > 0), _WANT_DRAFT, 0)
        want = want | tl.where(listened != 0, 1 + tl.where(has_draft != 0, _WANT_DRAFT, 0), 0)
        tl.store(x_ptr + row, x)
        tl.store(want_ptr + row, want)
        tl.store(flags_ptr + row, flags)
    tl.store(x_ptr + last, tl.full((), -1, tl.int64))
    tl.store(want_ptr + last, 0)
    tl.store(flags_ptr + last, 0)
