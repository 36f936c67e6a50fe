"""Stored sets, read sample by sample: packed files, published files and folder trees, behind ``Source``."""

from renaissance.data.sources.source import Source
from renaissance.data.sources.spec import Encoding, FileStamp, SourceSpec

__all__ = ["Encoding", "FileStamp", "Source", "SourceSpec"]
