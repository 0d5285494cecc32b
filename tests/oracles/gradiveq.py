"""GradiVeQ (Yu et al. 2018, sections 2 and 3), slice by slice and rank by rank, in float64.

`step(gradients)` takes [rank][layer] arrays in their layers' shapes and returns [layer] means over
the ranks, in these shapes.
"""

from __future__ import annotations

import numpy as np


class GradiVeQ:
    """A compressor, that is `mu` and `U`, for each group of `reuse` slices of a layer.

    Attributes:
        phase: what the last step was: "warmup", "sampling" or "compressed".
        loss: of the last step, mean over ranks of (7); None if that was not a compressed one.
        residuals: [rank][layer].
        dimensions: [layer][group], as found by the latest finished sampling; [] before.
    """

    def __init__(
        self,
        shapes,
        filters_last,
        ranks,
        *,
        slice_size=None,
        max_slice=4096,
        loss_threshold=None,
        ratio=None,
        reuse=None,
        warmup_steps,
        sample_steps,
        compress_steps,
        resample_loss=None,
        feedback=False,
    ):
        self.shapes, self.filters_last, self.ranks = shapes, filters_last, ranks
        self.slice_size, self.max_slice, self.reuse = slice_size, max_slice, reuse
        self.loss_threshold, self.ratio = loss_threshold, ratio
        self.warmup_steps, self.sample_steps = warmup_steps, sample_steps
        self.compress_steps, self.resample_loss = compress_steps, resample_loss
        self.feedback = feedback
        self.residuals = [[np.zeros(shape) for shape in shapes] for _ in range(ranks)]
        self.samples = [{} for _ in shapes]  # of each layer, by group: (step, slice, weight)
        self.recorded = 0  # sampling steps of this cycle
        self.compressors = [{} for _ in shapes]  # likewise, (mu, U)
        self.phase = self.loss = None
        self.schedule = self.phases()

    @property
    def dimensions(self):
        return [[U.shape[1] for _, U in groups.values()] for groups in self.compressors]

    def phases(self):
        """Figure 6, and the end of section 3: when the loss is large, sampling resumes."""
        for _ in range(self.warmup_steps):
            yield "warmup"
        while True:
            for _ in range(self.sample_steps):
                yield "sampling"
            for _ in range(self.compress_steps):
                yield "compressed"
                if self.resample_loss is not None and self.loss > self.resample_loss:
                    break

    def step(self, gradients):
        self.phase = next(self.schedule)
        accumulated = [[np.asarray(g, np.float64) for g in of_rank] for of_rank in gradients]
        if self.phase == "compressed":
            drain = min(1.0, 4.0 / self.compress_steps) if self.feedback else 0.0
            for of_rank, kept in zip(accumulated, self.residuals):
                for layer in range(len(self.shapes)):
                    of_rank[layer] += drain * kept[layer]
                    kept[layer] = (1.0 - drain) * kept[layer]
            return self.compressed(accumulated)
        self.loss = None
        means = []
        for layer in range(len(self.shapes)):
            total = sum(accumulated[rank][layer] for rank in range(self.ranks))
            means.append(total / self.ranks)
        if self.phase == "sampling":
            self.sample(means)
        return means

    # -- the vector and its slices -------------------------------------------------------------

    def flattened(self, g):
        """The collocated gradients of all filters together; then by depth, width, height."""
        if not self.filters_last:  # [F, D, h, w] to (h, w, D, F)
            g = g.transpose((*range(2, g.ndim), 1, 0)[-g.ndim :])
        return g.reshape(-1)

    def shaped(self, layer, vector):
        shape = self.shapes[layer]
        if self.filters_last:
            return vector.reshape(shape)
        axes = [shape[axis] for axis in (*range(2, len(shape)), 1, 0)[-len(shape) :]]
        g = vector.reshape(axes)  # (h, w, D, F); back to [F, D, h, w]
        return g.transpose((g.ndim - 1, g.ndim - 2, *range(g.ndim - 2))[: g.ndim])

    def length(self, layer):
        """Of this layer's slices."""
        shape = self.shapes[layer]
        F = shape[-1] if self.filters_last else shape[0]
        D = 1
        if len(shape) > 1:
            D = shape[-2] if self.filters_last else shape[1]
        size = int(np.prod(shape))
        if self.slice_size is not None:
            return min(self.slice_size, size)
        longest = self.max_slice if self.max_slice >= F * D else max(1, self.max_slice // 4)
        equal = [n for n in range(1, size + 1) if size % n == 0]  # parts of the layer
        whole = [n for n in equal if n % (F * D) == 0]  # positions of the kernel
        deep = [n for n in equal if n % F == 0 and (F * D) % n == 0]  # equal parts of the depth
        few = [n for n in equal if F % n == 0]  # of the filters
        for length in sorted({*whole, *deep, *few}, reverse=True):
            count = size // length
            samples = self.sample_steps * min(self.reuse or count, count)
            enough = max(1, int(length / (8 if self.ratio is None else self.ratio)))
            if length <= longest and samples > enough:
                return length
        return 1

    def wanted(self, K):
        """Dimensions that a step records slices for."""
        return max(1, int(K / (4 if self.ratio is None else self.ratio)))

    def slices(self, layer, g):
        """In the order in which they share compressors; the last one is filled up with zeros."""
        vector, K = self.flattened(g), self.length(layer)
        results = []
        for start in range(0, len(vector), K):
            s = np.zeros(K)
            s[: len(vector[start : start + K])] = vector[start : start + K]
            results.append(s)
        return [results[number] for number in self.order(layer)]

    def joined(self, layer, slices):
        size = int(np.prod(self.shapes[layer]))
        placed = [None] * len(slices)
        for number, s in zip(self.order(layer), slices):
            placed[number] = s
        return self.shaped(layer, np.concatenate(placed)[:size])

    def block(self, layer):
        """Filters times depth."""
        shape = self.shapes[layer]
        filters_and_depth = shape[-2:] if self.filters_last else shape[:2]
        return int(np.prod(filters_and_depth))

    def order(self, layer):
        """Numbers of the slices: part by part of a block, then by the kernel's positions."""
        size, K = int(np.prod(self.shapes[layer])), self.length(layer)
        parts = 1 if self.slice_size is not None else max(1, self.block(layer) // K)
        count = -(-size // K)
        if self.sharing(layer) == count:
            return range(count)
        return [number for part in range(parts) for number in range(part, count, parts)]

    def sharing(self, layer):
        """How many neighbours have one compressor."""
        size, K = int(np.prod(self.shapes[layer])), self.length(layer)
        count = -(-size // K)
        if self.reuse is not None:
            return min(self.reuse, count)
        parts = 1 if self.slice_size is not None else max(1, self.block(layer) // K)
        for compressors in range(min(parts, 16), 1, -1) if parts < count else ():
            together = count // compressors
            if parts % compressors or 16 * compressors * K * self.wanted(K) > self.max_slice**2:
                continue
            if self.sample_steps * together > 3 * self.wanted(K):
                return together
        return count

    def group(self, layer, number):
        """Which compressor the slice of this number has."""
        return number // self.sharing(layer)

    # -- sampling ------------------------------------------------------------------------------

    def sample(self, means):
        """Some slices of each compressor a step, in turn; each step counts by its energy's inverse.

        The paper takes the first slice only, and all steps alike.
        """
        t = self.recorded
        for layer, mean in enumerate(means):
            members = {}
            for number, s in enumerate(self.slices(layer, mean)):
                members.setdefault(self.group(layer, number), []).append(s)
            K, shared = self.length(layer), len(members[0])
            rows = min(shared, -(-(3 * self.wanted(K) + 1) // self.sample_steps))
            for group, slices in members.items():
                energy = sum(float((s**2).sum()) for s in slices)
                weight = 1 / energy if energy > 0 else 0.0
                for i in range(rows):
                    s = slices[(t * rows + i) % len(slices)]
                    self.samples[layer].setdefault(group, []).append((t, s, weight))
        self.recorded += 1
        if self.recorded == self.sample_steps:
            for layer, groups in enumerate(self.samples):
                for group, samples in groups.items():
                    self.compressors[layer][group] = self.learned(samples)
            self.samples = [{} for _ in self.shapes]
            self.recorded = 0

    def learned(self, samples):
        """`mu` and `U`: the eigenvectors of the covariance, the most significant ones."""
        K = len(samples[0][1])
        everything = self.components(samples)
        fitted = self.sample_steps - self.sample_steps // 4
        rows = len(samples) // self.sample_steps
        if self.ratio is not None:
            d = max(1, min(K, len(samples) - 1, self.wanted(K)))
        else:  # (6), of samples that the basis was not fitted to
            chosen = [x for x in samples if x[0] >= fitted] or samples
            mu, U, _ = self.components([x for x in samples if x[0] < fitted])
            limit = min(K, fitted * rows - 1, max(self.sample_steps - 1, self.wanted(K)))
            whole = sum(w * float(s @ s) for _, s, w in chosen)
            d = 1
            while d < limit:
                left = sum(w * self.left_out(s - mu, U[:, :d]) for _, s, w in chosen)
                if left <= self.loss_threshold * whole:
                    break
                d += 1
        mu, vectors, values = everything
        U = np.zeros((K, d))
        for i in range(min(d, vectors.shape[1])):
            if values[i] > 1e-9 * values[0]:
                U[:, i] = vectors[:, i]
        return mu, U

    @staticmethod
    def left_out(s, U):
        rest = s - U @ (U.T @ s)
        return float(rest @ rest)

    @staticmethod
    def components(samples):
        """Mean, eigenvectors and eigenvalues of the covariance, the largest first."""
        K = len(samples[0][1])
        total = sum(w for _, _, w in samples) or 1.0
        mu = np.zeros(K)
        for _, s, w in samples:
            mu += w / total * s
        covariance = np.zeros((K, K))
        for _, s, w in samples:
            covariance += w / total * np.outer(s - mu, s - mu)
        values, vectors = np.linalg.eigh(covariance)
        return mu, vectors[:, ::-1], values[::-1].clip(min=0)

    # -- compressed ----------------------------------------------------------------------------

    def compressed(self, vector):
        means = []
        lost, whole = np.zeros(self.ranks), np.zeros(self.ranks)
        for layer in range(len(self.shapes)):
            slices = [self.slices(layer, vector[rank][layer]) for rank in range(self.ranks)]
            decompressed, kept = [], [[] for _ in range(self.ranks)]
            for number in range(len(slices[0])):
                mu, U = self.compressors[layer][self.group(layer, number)]
                z = np.zeros(U.shape[1])
                for rank in range(self.ranks):
                    s = slices[rank][number]
                    z += U.T @ (s - mu) / self.ranks  # (3), (4)
                    projected = U @ (U.T @ (s - mu)) + mu  # the local decompression of (7)
                    lost[rank] += ((s - projected) ** 2).sum()
                    whole[rank] += (s**2).sum()
                    kept[rank].append(s - projected)
                decompressed.append(U @ z + mu)  # (5)
            means.append(self.joined(layer, decompressed))
            if self.feedback:
                for rank in range(self.ranks):
                    self.residuals[rank][layer] += self.joined(layer, kept[rank])
        losses = [lost[rank] / whole[rank] if whole[rank] else 0.0 for rank in range(self.ranks)]
        self.loss = float(sum(losses)) / self.ranks
        return means
