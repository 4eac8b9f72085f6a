"""Training data: latent folders, programs that make them, and embedded data sets."""

import runtime.openmp  # before torch

from data.embedded import digits
from data.encoders import IdentityEncoder, KLEncoder, encoder_for, image_decoder, load_encoder, real_images
from data.features import PatchEncoder
from data.glyphs import glyphs
from data.images import ImageFiles, NpzImages, centre_crop, open_images
from data.latents import LatentDataset, open_latents
from data.manifest import LatentManifest, manifest_from, read_manifest
from data.mixture import MixtureDataset, mixture
from data.scenes import scenes
from data.stream import StoredBatch, StreamOrder, entries_by_step, held_out_batches, mask_coverage, stream
from data.synthetic import synthetic
from data.text import Words, text_encoder_for
from data.writer import LatentWriter
