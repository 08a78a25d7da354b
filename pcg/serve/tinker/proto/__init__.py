"""The protobuf messages of Tinker's protocol, decoded and encoded."""

from pcg.serve.tinker.proto.requests import (
    ForwardBackwardCall,
    TinkerDatum,
    decode_forward_backward,
    place_of,
)
from pcg.serve.tinker.proto.responses import (
    ForwardBackwardResult,
    SampledTokens,
    SampleResult,
    TopLogprobs,
    encode_forward_backward,
    encode_sample,
)

__all__ = [
    "ForwardBackwardCall",
    "ForwardBackwardResult",
    "SampleResult",
    "SampledTokens",
    "TinkerDatum",
    "TopLogprobs",
    "decode_forward_backward",
    "encode_forward_backward",
    "encode_sample",
    "place_of",
]
