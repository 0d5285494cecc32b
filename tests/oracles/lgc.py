"""LGC (Abrahamyan et al. 2021, sections IV and V), element by element and rank by rank.

`step(gradients)` takes [rank][layer] vectors and returns [layer] means over the ranks. Residuals
are float32; the autoencoder, with derivatives by hand, is float64.

A network is a list of (weight, bias), one a convolution, in PyTorch's shapes: [out, in, taps] of a
convolution, [in, out, taps] of a transposed one. A signal is [channels, positions].
"""

from __future__ import annotations

import numpy as np

F = np.float32
SLOPE = 0.01  # of the leaky ReLU
LIMIT = 10.0  # of a network's gradient norm
STRIDES = (2, 2, 2, 2, 1)  # Table I
WIDENINGS = (1, 2, 2, 2, 2)  # Table II, the first one as strides have to match Table I


# -- convolutions ------------------------------------------------------------------------------


def pairs(narrow, wide, stride, tap, taps):
    """Positions p of the narrow and q of the wide side that a tap joins.

    They are such that q = stride*p + tap - padding, where one tap has no padding and three have 1.
    """
    pairs = [(p, stride * p + tap - taps // 2) for p in range(narrow)]
    pairs = [(p, q) for p, q in pairs if 0 <= q < wide]
    return [p for p, _ in pairs], [q for _, q in pairs]


def conv(x, weight, bias, stride):
    outputs, _, taps = weight.shape
    y = np.zeros((outputs, x.shape[1] // stride)) + bias[:, None]
    for tap in range(taps):
        p, q = pairs(y.shape[1], x.shape[1], stride, tap, taps)
        y[:, p] += weight[:, :, tap] @ x[:, q]
    return y


def conv_back(x, weight, stride, dy):
    """Derivatives by x, weight and bias."""
    dx, dweight, taps = np.zeros_like(x), np.zeros_like(weight), weight.shape[2]
    for tap in range(taps):
        p, q = pairs(dy.shape[1], x.shape[1], stride, tap, taps)
        dx[:, q] += weight[:, :, tap].T @ dy[:, p]
        dweight[:, :, tap] += dy[:, p] @ x[:, q].T
    return dx, (dweight, dy.sum(axis=1))


def deconv(x, weight, bias, stride):
    _, outputs, taps = weight.shape
    y = np.zeros((outputs, x.shape[1] * stride)) + bias[:, None]
    for tap in range(taps):
        p, q = pairs(x.shape[1], y.shape[1], stride, tap, taps)
        y[:, q] += weight[:, :, tap].T @ x[:, p]
    return y


def deconv_back(x, weight, stride, dy):
    dx, dweight, taps = np.zeros_like(x), np.zeros_like(weight), weight.shape[2]
    for tap in range(taps):
        p, q = pairs(x.shape[1], dy.shape[1], stride, tap, taps)
        dx[:, p] += weight[:, :, tap] @ dy[:, q]
        dweight[:, :, tap] += x[:, p] @ dy[:, q].T
    return dx, (dweight, dy.sum(axis=1))


def leaky(y):
    return np.where(y > 0, y, SLOPE * y)


def leaky_back(y, dy):
    return np.where(y > 0, dy, SLOPE * dy)


# -- the autoencoder ---------------------------------------------------------------------------


def encode(encoder, x):
    """Table I. Returns the code, and what its derivative needs: each layer's input and output."""
    signal, trace = x[None, :], []
    for number, (weight, bias) in enumerate(encoder):
        y = conv(signal, weight, bias, STRIDES[number])
        trace.append((signal, y))
        signal = leaky(y) if number < 4 else y
    return signal.T.reshape(-1), trace  # position after position


def encode_back(encoder, trace, dcode):
    """The derivative by each (weight, bias)."""
    dsignal, gradients = dcode.reshape(-1, 4).T, []
    for number in (4, 3, 2, 1, 0):
        x, y = trace[number]
        dy = leaky_back(y, dsignal) if number < 4 else dsignal
        dsignal, d = conv_back(x, encoder[number][0], STRIDES[number], dy)
        gradients.insert(0, d)
    return gradients


def decode(decoder, code, innovation=None):
    """Table II. The innovation is a channel more before the last convolution."""
    signal, trace = code.reshape(-1, 4).T, []
    for number, (weight, bias) in enumerate(decoder):
        if number < 5:
            y = deconv(signal, weight, bias, WIDENINGS[number])
            trace.append((signal, y))
            signal = leaky(y)
        else:
            if innovation is not None:
                signal = np.concatenate([signal, innovation[None, :]])
            y = conv(signal, weight, bias, 1)
            trace.append((signal, y))
            signal = y
    return signal[0], trace


def decode_back(decoder, trace, dvector):
    """The derivatives by the code, and by each (weight, bias)."""
    dsignal, d = conv_back(trace[5][0], decoder[5][0], 1, dvector[None, :])
    dsignal, gradients = dsignal[:32], [d]  # not by the innovation
    for number in (4, 3, 2, 1, 0):
        x, y = trace[number]
        dy = leaky_back(y, dsignal)
        dsignal, d = deconv_back(x, decoder[number][0], WIDENINGS[number], dy)
        gradients.insert(0, d)
    return dsignal.T.reshape(-1), gradients


def plus(one, other):
    return [(w + v, b + c) for (w, b), (v, c) in zip(one, other)]


def descended(network, gradient, lr):
    """A step of SGD; a gradient longer than LIMIT is scaled down to it."""
    norm = sum((d**2).sum() for layer in gradient for d in layer) ** 0.5
    by = lr * (LIMIT / norm if norm > LIMIT else 1.0)
    return [(w - by * dw, b - by * db) for (w, b), (dw, db) in zip(network, gradient)]


class Adam:
    """Kingma and Ba 2015, Algorithm 1, with its own constants; of one network."""

    def __init__(self):
        self.t, self.m, self.v = 0, 0.0, 0.0

    def step(self, network, gradient, lr):
        self.t += 1
        g = np.concatenate([d.ravel() for layer in gradient for d in layer])
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g * g
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        away, start, parts = lr * m / (np.sqrt(v) + 1e-8), 0, []
        for w, b in network:
            dw, start = away[start : start + w.size].reshape(w.shape), start + w.size
            db, start = away[start : start + b.size], start + b.size
            parts.append((w - dw, b - db))
        return parts


def aggregating(encoder, decoder, xs):
    """(11): the loss, the target's square, and the derivatives by encoder and decoder."""
    K = len(xs)
    codes = [encode(encoder, x) for x in xs]  # (8)
    average = sum(code for code, _ in codes) / K  # (9)
    rec, trace = decode(decoder, average)  # (10)
    target = sum(xs) / K
    daverage, ddecoder = decode_back(decoder, trace, 2 * (rec - target))
    dencoder = None
    for _, trace in codes:
        d = encode_back(encoder, trace, daverage / K)
        dencoder = d if dencoder is None else plus(dencoder, d)
    return ((rec - target) ** 2).sum(), (target**2).sum(), dencoder, ddecoder


def decoupling(encoder, decoders, xs, js, c, lambda_rec, lambda_sim):
    """(6), the targets' squares, and the derivatives of (7) by the encoder and each decoder."""
    K = len(xs)
    codes = [encode(encoder, x) for x in xs]
    dcodes = [np.zeros_like(code) for code, _ in codes]
    rec_loss, ddecoders = 0.0, []
    for k in range(K):
        rec, trace = decode(decoders[k], codes[c][0], js[k])  # (3), (4)
        rec_loss += ((xs[k] - rec) ** 2).sum()  # (6)
        dcode, d = decode_back(decoders[k], trace, lambda_rec * 2 * (rec - xs[k]))
        dcodes[c] += dcode
        ddecoders.append(d)
    for k in range(K):  # (5): each pair counts twice, as (k, m) and as (m, k)
        for m in range(K):
            apart = codes[k][0] - codes[m][0]
            dcodes[k] += lambda_sim * 2 * apart
            dcodes[m] -= lambda_sim * 2 * apart
    dencoder = None
    for (_, trace), dcode in zip(codes, dcodes):
        d = encode_back(encoder, trace, dcode)
        dencoder = d if dencoder is None else plus(dencoder, d)
    return rec_loss, sum((x**2).sum() for x in xs), dencoder, ddecoders


# -- the method --------------------------------------------------------------------------------


def largest(values, k):
    """The places of the k largest magnitudes, zeros excepted, in ascending order."""
    ranked = sorted(range(len(values)), key=lambda i: -abs(values[i]))
    return sorted(i for i in ranked[:k] if values[i] != 0)


class LGC:
    """Dense, then top-k while the autoencoder is trained, then compressed.

    Args:
        sizes: of the layers that are compressed.
        pattern: "ring..." or "parameter...".
        encoder, decoders: initial networks; one decoder for the ring, else one a rank.
        master: trains; whoever it is, the numbers are the same.
        common_rank: whose code and indices travel (parameter server), while training too.
        signs: whether that rank's signs, or the leader's, are taken out of all ranks' vectors.
        scale: "layer" or "model", of which the root mean square is 1 for that rank.
        ae_steps: of gradient descent, in each iteration.
        feedback: "exact" or "paper".
        drawn: `drawn(t, purpose, ranks)`: the leader (0).

    Attributes:
        r, u: [rank][layer], float32.
        owed: [rank][layer], float32: what came back as something else, with exact feedback; sent
            with r, but elements are selected by r alone.
        encoder, decoders: the networks now.
        loss: reconstruction loss of the last trained step, before that step's update, divided by
            the square of what was to be reconstructed; 0 if that is 0.
        converged: None until the training is over.
        asked, came: by place, the mean of what was to be reconstructed in the last compressed step,
            and what was.
    """

    def __init__(
        self,
        sizes,
        ranks,
        encoder,
        decoders,
        *,
        pattern,
        alpha,
        full_steps,
        train_steps,
        innovation,
        ae_lr,
        lambda_rec,
        lambda_sim,
        master,
        common_rank,
        feedback,
        momentum,
        masking,
        drawn,
        signs,
        scale,
        ae_steps,
    ):
        self.sizes, self.ranks = sizes, ranks
        self.encoder, self.decoders = doubled(encoder), [doubled(one) for one in decoders]
        self.ring = pattern.startswith("ring")
        self.full_steps, self.train_steps = full_steps, train_steps
        self.ae_lr, self.lambda_rec, self.lambda_sim = ae_lr, lambda_rec, lambda_sim
        self.master, self.common_rank = master, common_rank
        self.exact = {"exact": True, "paper": False}[feedback]
        self.m, self.masking, self.drawn = F(momentum), masking, drawn
        self.k = [min(n, max(1, int(n * alpha + 0.5))) for n in sizes]
        self.mu = sum(self.k)
        if not self.ring:
            self.innovation = [max(1, int(innovation * k + 0.5)) for k in self.k]
        self.signs, self.by_layer, self.ae_steps = signs, scale == "layer", ae_steps
        self.r = [[np.zeros(n, F) for n in sizes] for _ in range(ranks)]
        self.u = [[np.zeros(n, F) for n in sizes] for _ in range(ranks)]
        self.owed = [[np.zeros(n, F) for n in sizes] for _ in range(ranks)]  # exact feedback
        self.t, self.losses, self.loss, self.converged = 0, [], None, None

    def step(self, gradients):
        t, self.t = self.t, self.t + 1
        trained = self.full_steps + self.train_steps
        if t < self.full_steps:
            return self.dense(gradients)
        for rank in range(self.ranks):
            for layer in range(len(self.sizes)):
                u = F(self.u[rank][layer] * self.m) + gradients[rank][layer]
                self.u[rank][layer] = u
                self.r[rank][layer] = self.r[rank][layer] + u
        if t < trained:
            result = self.sparse(t, train=True)
        elif self.converged:
            result = self.averaged(t) if self.ring else self.reconstructed()
        else:
            result = self.sparse(t, train=False)
        if self.train_steps and t == trained - 1:
            last = self.losses[-max(1, self.train_steps // 10) :]
            self.converged = bool(sum(last) / len(last) <= 0.95)
        return result

    def dense(self, gradients):
        means = []
        for layer in range(len(self.sizes)):
            total = sum(gradients[rank][layer].astype(float) for rank in range(self.ranks))
            for rank in range(self.ranks):
                u = F(self.u[rank][layer] * self.m) + F(total / self.ranks)
                self.u[rank][layer] = u
            means.append(self.u[0][layer].copy())
        return means

    # -- vectors: `where` is a list of (layer, index) ------------------------------------------

    def selected(self, rank):
        """Layer after layer, what is largest there."""
        return [
            (layer, i) for layer, k in enumerate(self.k) for i in largest(self.r[rank][layer], k)
        ]

    def values(self, rank, where):
        return [self.r[rank][layer][i] + self.owed[rank][layer][i] for layer, i in where]

    def clear(self, state, rank, where):
        for layer, i in where:
            state[rank][layer][i] = 0

    def units(self, where, values):
        """What each element is measured in: a root mean square, and the sign of these values."""
        units = []
        for layer, _ in where:
            peers = [float(v) ** 2 for (m, _), v in zip(where, values) if m == layer]
            if not self.by_layer:
                peers = [float(v) ** 2 for v in values] + [0.0] * (self.mu - len(values))
            square = sum(peers) / len(peers)
            units.append(square**0.5 if square > 0 else 1.0)
        return [-s if self.signs and v < 0 else s for s, v in zip(units, values)]

    def filled(self, values, units):
        """Divided by their units, with zeros up to a multiple of 16 that holds mu."""
        x = np.zeros((self.mu + 15) // 16 * 16)
        for i, v in enumerate(values):
            x[i] = float(v) / units[i]
        return x

    def zeros(self):
        return [np.zeros(n) for n in self.sizes]

    # -- top-k, with and without training ------------------------------------------------------

    def sparse(self, t, train):
        if self.ring:
            common = self.selected(self.drawn(t, 0, self.ranks))
            where = [common for _ in range(self.ranks)]
        else:
            where = [self.selected(rank) for rank in range(self.ranks)]
        sent = [self.values(rank, where[rank]) for rank in range(self.ranks)]
        means = self.zeros()
        for rank in range(self.ranks):
            for (layer, i), v in zip(where[rank], sent[rank]):
                means[layer][i] += float(v) / self.ranks
            self.clear(self.r, rank, where[rank])
            self.clear(self.owed, rank, where[rank])
            if self.masking:
                self.clear(self.u, rank, where[rank])
        if train and self.ring:
            self.train_aggregation(t, where, sent)
        elif train:
            self.train_decoupling(t, where, sent)
        return [F(mean) for mean in means]

    def train_aggregation(self, t, where, sent):
        """Section IV.B."""
        units = self.units(where[0], sent[self.drawn(t, 0, self.ranks)])
        xs = [self.filled(v, units) for v in sent]
        self.train(lambda: self.as_many(*aggregating(self.encoder, self.decoders[0], xs)))

    def as_many(self, error, square, dencoder, ddecoder):
        return error, square, dencoder, [ddecoder]

    def train(self, derivatives):
        for step in range(self.ae_steps):
            error, square, dencoder, ddecoders = derivatives()
            if step == 0:
                self.note(error, square)
            self.encoder = descended(self.encoder, dencoder, self.ae_lr)
            self.decoders = [
                descended(decoder, d, self.ae_lr) for decoder, d in zip(self.decoders, ddecoders)
            ]

    def train_decoupling(self, t, where, sent):
        """Section IV.A; the vectors of all workers as they are at the places of one of them."""
        c = self.common_rank
        units = self.units(where[c], sent[c])
        xs, js = [], []
        for k in range(self.ranks):
            G = dict(zip(where[k], sent[k]))
            J = self.innovations(where[k], sent[k])
            xs.append(self.filled([G.get(place, 0.0) for place in where[c]], units))
            js.append(self.filled([J.get(place, 0.0) for place in where[c]], units))
        weights = self.lambda_rec, self.lambda_sim
        self.train(lambda: decoupling(self.encoder, self.decoders, xs, js, c, *weights))

    def innovations(self, where, values):
        """The largest of the selected ones of each layer (Algorithm 1); values by place."""
        results = {}
        for layer, count in enumerate(self.innovation):
            of_layer = [i for i, (of, _) in enumerate(where) if of == layer]
            strong = largest([values[i] for i in of_layer], count)
            results |= {where[of_layer[i]]: values[of_layer[i]] for i in strong}
        return results

    def note(self, error, square):
        self.loss = float(error / square) if square > 0 else 0.0
        self.losses.append(self.loss)

    # -- compressed ----------------------------------------------------------------------------

    def averaged(self, t):
        """Algorithm 2."""
        leader = self.drawn(t, 0, self.ranks)
        where = self.selected(leader)
        v = [[self.r[rank][layer][i] for layer, i in where] for rank in range(self.ranks)]
        units = self.units(where, v[leader])
        codes = [encode(self.encoder, self.filled(v[rank], units))[0] for rank in range(self.ranks)]
        average = sum(codes) / self.ranks  # (18)
        rec = F(decode(self.decoders[0], average)[0][: len(units)] * units)  # (19)
        alone = [F(decode(self.decoders[0], code)[0][: len(units)] * units) for code in codes]
        self.requested = {
            place: sum(one[i] for one in v) / self.ranks for i, place in enumerate(where)
        }
        self.came = dict(zip(where, rec))
        means = [F(mean) for mean in self.zeros()]
        for number, (layer, i) in enumerate(where):
            means[layer][i] = rec[number]
            for rank in range(self.ranks):
                self.r[rank][layer][i] = 0
                if self.exact:  # r and owed together: own value - reconstructed mean
                    self.r[rank][layer][i] = v[rank][number] - alone[rank][number]
                    self.owed[rank][layer][i] += alone[rank][number] - rec[number]
                if self.masking:
                    self.u[rank][layer][i] = 0
        return means

    def reconstructed(self):
        """Algorithm 1."""
        c = self.common_rank
        where = [self.selected(rank) for rank in range(self.ranks)]
        v = [self.values(rank, where[rank]) for rank in range(self.ranks)]
        units = self.units(where[c], v[c])
        code, _ = encode(self.encoder, self.filled(v[c], units))
        self.requested = {place: 0.0 for place in where[c]}  # of what each worker has selected
        for k in range(self.ranks):
            for place, value in zip(where[k], v[k]):
                if place in self.requested:
                    self.requested[place] += value / self.ranks
        places = set(where[c])
        means = self.zeros()
        for k in range(self.ranks):
            J = self.innovations(where[k], v[k])
            j = self.filled([J.get(place, 0.0) for place in where[c]], units)
            rec, _ = decode(self.decoders[k], code, j)  # (12)
            vector = dict(zip(where[c], rec[: len(units)] * units))
            for place, value in J.items():
                if place not in vector:
                    vector[place] = float(value)
            places |= set(J)
            for (layer, i), value in vector.items():  # (13)
                means[layer][i] += value / self.ranks
            if self.masking:  # what k has sent, or in the paper's way selected
                self.clear(self.u, k, J if self.exact else where[k])
                if k == c:
                    self.clear(self.u, k, where[c])
        # The way back is in half precision, of the largest.
        largest = F(max((abs(means[layer][i]) for layer, i in places), default=0)) or F(1)
        means = [F(np.float16(F(mean) / largest)) * largest for mean in means]
        self.came = {(layer, i): means[layer][i] for layer, i in where[c]}
        for rank in range(self.ranks):
            if not self.exact:
                self.clear(self.r, rank, where[rank])
                continue
            for (layer, i), value in zip(where[rank], v[rank]):
                if (layer, i) in places:  # the rest of it is known to be missing and stays
                    self.r[rank][layer][i] = 0
                    self.owed[rank][layer][i] = value
            for layer, i in places:  # together: own value - reconstructed mean
                self.owed[rank][layer][i] -= means[layer][i]
        return means


# -- the package's flat parameters -------------------------------------------------------------


def doubled(network):
    return [(np.asarray(w, float), np.asarray(b, float)) for w, b in network]


def shapes(decoder, innovation=False):
    """(inputs, outputs, taps) of each convolution."""
    if decoder:
        return [
            (4, 4, 3),
            (4, 32, 3),
            (32, 64, 3),
            (64, 128, 3),
            (128, 32, 3),
            (32 + innovation, 1, 1),
        ]
    return [(1, 64, 3), (64, 128, 3), (128, 256, 3), (256, 64, 3), (64, 4, 1)]


def unpacked(encoder, decoders, innovation):
    """Networks from a vector and a matrix with a decoder a row: matrix, bias, layer after layer.

    A convolution's matrix is [taps * inputs, outputs], a transposed one's [inputs, taps * outputs].
    """

    def network(flat, decoder):
        parts, start = [], 0
        for inputs, outputs, taps in shapes(decoder, innovation):
            count = inputs * outputs * taps
            weight = np.asarray(flat[start : start + count], float)
            if decoder and taps > 1:
                weight = weight.reshape(inputs, taps, outputs).transpose(0, 2, 1)
            else:
                weight = weight.reshape(taps, inputs, outputs).transpose(2, 1, 0)
            bias = np.asarray(flat[start + count : start + count + outputs], float)
            parts.append((weight, bias))
            start += count + outputs
        return parts

    return network(encoder, False), [network(row, True) for row in decoders]


def packed(encoder, decoders):
    """The inverse of `unpacked`."""

    def flat(network, decoder):
        pieces = []
        for weight, bias in network:
            transposed = decoder and weight.shape[2] > 1
            pieces.append(weight.transpose((0, 2, 1) if transposed else (2, 1, 0)).reshape(-1))
            pieces.append(bias)
        return np.concatenate(pieces)

    return flat(encoder, False), np.stack([flat(one, True) for one in decoders])
