"""The loudest energy of a recording is that of its spectrogram, and its bits depend on nothing but the samples."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.spectrogram import AROUND, BEFORE, BINS, HOP, RATE, WINDOW, fourier_table, mel_filters
from server.audio import loudest
from server.audio.loudest import loudest_energy
from server.audio.recording import Recording, with_surroundings

NOISE = (0.2 * np.random.default_rng(0).standard_normal(RATE)).astype(np.float32)


def energies(samples: NDArray[np.float32], num_mels: int) -> NDArray[np.float64]:
    """Return the energies of all hops, [hops, mels], by NumPy's Fourier transform."""
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    windows = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64), WINDOW)[::HOP]
    return np.abs(np.fft.rfft(windows * hann)) ** 2 @ mel_filters(num_mels).T


@pytest.mark.parametrize("num_mels", [80, 128])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-7])
def test_it_is_the_largest_of_the_spectrogram(num_mels: int, scale: float) -> None:
    samples = with_surroundings((scale * NOISE).astype(np.float32))
    assert loudest_energy(samples, num_mels) == pytest.approx(energies(samples, num_mels).max(), rel=1e-5)


def test_the_table_is_a_fourier_transform() -> None:
    window = NOISE[:WINDOW].astype(np.float64)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    parts = fourier_table() @ window
    np.testing.assert_allclose(parts[:BINS] - 1j * parts[BINS:], np.fft.rfft(window * hann), atol=1e-9)


def test_sums_are_exact_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers of 64 bits give the same sums as products of matrices, which round if a number is too large."""
    samples = with_surroundings(NOISE)
    top = 2 ** (loudest.SAMPLE_BITS - np.frexp(np.abs(samples).max())[1])
    table = np.rint(fourier_table() * 2**loudest.TABLE_BITS)
    windows = np.rint(np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64) * top, WINDOW)[::HOP]).T
    np.testing.assert_array_equal(table @ windows, table.astype(np.int64) @ windows.astype(np.int64))
    assert np.abs(table).sum(axis=1).max() * 2**loudest.SAMPLE_BITS < 2**53


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = with_surroundings(NOISE)
    whole = loudest_energy(samples, 80)
    monkeypatch.setattr(loudest, "BLOCK", 7)
    assert loudest_energy(samples, 80) == whole


def test_silence_has_no_energy() -> None:
    assert loudest_energy(with_surroundings(np.zeros(100, np.float32)), 80) == 0.0


@pytest.mark.parametrize("size", [0, 1, 150, BEFORE, BEFORE + 1, 5000])
def test_a_recording_is_reflected_before_and_silent_after(size: int) -> None:
    samples = NOISE[:size]
    recording = Recording(with_surroundings(samples), 1.0)
    assert (recording.num_samples, recording.num_hops) == (size, size // HOP)
    np.testing.assert_array_equal(recording.samples[BEFORE : BEFORE + size], samples)
    if size > BEFORE:
        np.testing.assert_array_equal(recording.samples[:BEFORE], samples[BEFORE:0:-1])
    assert not recording.samples[BEFORE + size :].any()


def test_pieces_overlap_by_what_is_around_them() -> None:
    recording = Recording(with_surroundings(NOISE), 1.0)
    first, second = (np.frombuffer(recording.piece(begin, 30).samples, "<f4") for begin in (0, 30))
    assert len(first) == 30 * HOP + AROUND
    np.testing.assert_array_equal(first[-AROUND:], second[:AROUND])
    assert len(Recording(with_surroundings(NOISE[:5]), 1.0).piece(0, 0).samples) == 4 * (HOP + AROUND)
