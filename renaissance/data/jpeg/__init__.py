"""Reading and decoding of stored pictures: JPEG, and PNG in disguise. See docs/jpeg.md."""

from renaissance.data.jpeg.decoder import Decoded, Decoder, decoder_identity
from renaissance.data.jpeg.header import MAX_PIXELS, PictureHeader, read_header
from renaissance.data.jpeg.restarts import add_restarts

__all__ = ["MAX_PIXELS", "Decoded", "Decoder", "PictureHeader", "add_restarts", "decoder_identity", "read_header"]
