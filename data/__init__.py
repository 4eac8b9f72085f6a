"""Training data: folders of precomputed latents, and the data sets that make them."""

from data.digits import digits
from data.encoders import IdentityEncoder, encode_images, encoder_for, image_decoder, real_images, to_uint8
from data.images import ImageFiles, NpzImages, centre_crop, open_images
from data.latents import LatentDataset, LatentManifest, LatentWriter, manifest_from, open_latents, read_manifest
from data.stream import MicroBatch, StreamOrder, count_forced, held_out_batches, mask_coverage, stream
from data.synthetic import synthetic

__all__ = [
    "IdentityEncoder",
    "ImageFiles",
    "LatentDataset",
    "LatentManifest",
    "LatentWriter",
    "MicroBatch",
    "NpzImages",
    "StreamOrder",
    "centre_crop",
    "count_forced",
    "digits",
    "encode_images",
    "encoder_for",
    "held_out_batches",
    "image_decoder",
    "manifest_from",
    "mask_coverage",
    "open_images",
    "open_latents",
    "read_manifest",
    "real_images",
    "stream",
    "synthetic",
    "to_uint8",
]
