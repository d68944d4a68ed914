"""Transformers, speech and other networks over sequences.

Most are architectures of the package `transformers`, built from a configuration with random weights: one
layer of each (two where neighbours differ), vocabularies cut where only the look-up would need them, and
lengths that are not multiples of anything: 197, 77, 1500, 49, 50, 100.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .blocks import Attention, Built, Fn, Network, Residual, act, conv, mlp


class First(nn.Module):
    """A `transformers` model that returns its first output; `argument` is what its input is called."""

    def __init__(self, model: nn.Module, arguments: tuple[str, ...], extra: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.arguments, self.extra = model, arguments, extra

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.model(**dict(zip(self.arguments, inputs, strict=True)), **self.extra, return_dict=False)[
            0
        ]


def transformer(
    name: str,
    model: str,
    *inputs: torch.Tensor | tuple[int, ...],
    arguments: tuple[str, ...] = ("input_ids",),
    attention: str = "eager",
    extra: dict[str, Any] | None = None,
    vocabulary: int = 512,
    **config: Any,
) -> Built:
    """Build ``transformers.<name>Config`` and ``transformers.<name><model>``.

    Parameters
    ----------
    name, model : str
        Stem of the configuration's class, and the rest of the model's class name.
    *inputs : tuple of int or torch.Tensor
        A shape for each argument: of random tokens for ``input_ids``, of a random tensor for others.
    arguments : tuple of str
        What the model calls its inputs.
    attention : str
        "eager" spells attention out; "sdpa" leaves it to the importer.
    extra : dict, optional
        Further arguments of ``forward``.
    vocabulary : int
        Rows of the embedding.
    **config
        The configuration.
    """
    import transformers

    if "input_ids" in arguments:
        config["vocab_size"] = vocabulary
    settings = getattr(transformers, f"{name}Config")(**config)
    settings._attn_implementation = attention
    net = getattr(transformers, f"{name}{model}")(settings)
    tensors = tuple(
        value
        if isinstance(value, torch.Tensor)
        else torch.randint(5, vocabulary - 1, value)
        if argument.endswith("input_ids")
        else torch.randn(value)
        for argument, value in zip(arguments, inputs, strict=True)
    )
    return First(net, arguments, extra or {}), tensors


PIXELS: dict[str, Any] = {"arguments": ("pixel_values",)}
DECODER: dict[str, Any] = {"extra": {"use_cache": False}, "num_hidden_layers": 1}


def vit(dim: int, heads: int, batch: int, size: int, patch: int) -> Built:
    return transformer(
        "ViT",
        "ForImageClassification",
        (batch, 3, size, size),
        hidden_size=dim,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        num_hidden_layers=1,
        image_size=size,
        patch_size=patch,
        num_labels=1000,
        **PIXELS,
    )


def deit() -> Built:
    return transformer(
        "DeiT",
        "ForImageClassificationWithTeacher",
        (4, 3, 224, 224),
        hidden_size=192,
        num_attention_heads=3,
        intermediate_size=768,
        num_hidden_layers=1,
        num_labels=1000,
        **PIXELS,
    )


def swin() -> Built:
    return transformer(
        "Swin",
        "ForImageClassification",
        (1, 3, 224, 224),
        embed_dim=96,
        depths=[1, 2, 1, 1],
        num_heads=[3, 6, 12, 24],
        num_labels=1000,
        **PIXELS,
    )


def segformer() -> Built:
    return transformer(
        "Segformer",
        "ForSemanticSegmentation",
        (1, 3, 256, 256),
        depths=[1, 1, 1, 1],
        hidden_sizes=[32, 64, 160, 256],
        num_labels=150,
        **PIXELS,
    )


def mobilevit() -> Built:
    return transformer(
        "MobileViT",
        "ForImageClassification",
        (1, 3, 256, 256),
        hidden_sizes=[96, 120, 144],
        neck_hidden_sizes=[16, 32, 48, 64, 80, 96, 384],
        num_labels=1000,
        **PIXELS,
    )


def poolformer() -> Built:
    return transformer(
        "PoolFormer",
        "ForImageClassification",
        (1, 3, 192, 192),
        depths=[1, 1, 1, 1],
        hidden_sizes=[64, 128, 320, 512],
        num_labels=1000,
        **PIXELS,
    )


def levit() -> Built:
    return transformer(
        "Levit",
        "ForImageClassification",
        (2, 3, 224, 224),
        hidden_sizes=[128, 256, 384],
        num_attention_heads=[4, 8, 12],
        depths=[1, 1, 1],
        num_labels=1000,
        **PIXELS,
    )


def pvt() -> Built:
    return transformer(
        "PvtV2", "ForImageClassification", (1, 3, 224, 224), depths=[1, 1, 1, 1], num_labels=1000, **PIXELS
    )


def dinov2() -> Built:
    return transformer(
        "Dinov2",
        "Model",
        (1, 3, 224, 224),
        hidden_size=384,
        num_attention_heads=6,
        num_hidden_layers=1,
        image_size=224,
        use_swiglu_ffn=True,
        **PIXELS,
    )


def detr_decoder() -> Built:
    """Object queries against image tokens: 100 queries, 13 x 17 tokens, three-layer box head."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Conv2d(512, 256, 1)
            self.own, self.cross = Attention(256, 8), Attention(256, 8)
            self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(3))
            self.ffn = mlp(256, 2048, 256)
            self.classes, self.boxes = nn.Linear(256, 92), mlp(256, 256, 256, 4, last="sigmoid")

        def forward(self, queries: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            memory = self.project(features).flatten(2).transpose(1, 2)
            x = self.norms[0](queries + self.own(queries))
            x = self.norms[1](x + self.cross(x, memory))
            x = self.norms[2](x + self.ffn(x))
            return self.classes(x), self.boxes(x)

    return Decoder(), (torch.randn(1, 100, 256), torch.randn(1, 512, 13, 17))


def clip_text(batch: int) -> Built:
    return transformer(
        "CLIPText",
        "ModelWithProjection",
        (batch, 77),
        hidden_size=512,
        intermediate_size=2048,
        num_attention_heads=8,
        num_hidden_layers=1,
        projection_dim=512,
    )


def distilbert() -> Built:
    return transformer(
        "DistilBert",
        "ForSequenceClassification",
        (1, 160),
        dim=384,
        n_heads=12,
        hidden_dim=1536,
        n_layers=1,
        num_labels=2,
    )


def albert() -> Built:
    return transformer(
        "Albert",
        "Model",
        (2, 50),
        embedding_size=128,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
        num_hidden_layers=1,
    )


def electra(batch: int, length: int) -> Built:
    return transformer(
        "Electra",
        "ForMaskedLM",
        (batch, length),
        vocabulary=30522,
        embedding_size=128,
        hidden_size=256,
        num_attention_heads=4,
        intermediate_size=1024,
        num_hidden_layers=1,
    )


def roberta() -> Built:
    return transformer(
        "Roberta",
        "ForQuestionAnswering",
        (1, 384),
        hidden_size=512,
        num_attention_heads=8,
        intermediate_size=2048,
        num_hidden_layers=1,
        max_position_embeddings=514,
    )


def mobilebert() -> Built:
    return transformer("MobileBert", "ForQuestionAnswering", (1, 200), num_hidden_layers=1)


def squeezebert() -> Built:
    return transformer(
        "SqueezeBert",
        "Model",
        (1, 96),
        num_hidden_layers=1,
        hidden_size=512,
        embedding_size=512,
        num_attention_heads=8,
        intermediate_size=2048,
    )


def deberta() -> Built:
    return transformer(
        "DebertaV2",
        "Model",
        (1, 64),
        hidden_size=384,
        num_attention_heads=6,
        intermediate_size=1536,
        num_hidden_layers=1,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=-1,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    )


def t5_encoder() -> Built:
    return transformer(
        "T5", "EncoderModel", (1, 64), d_model=512, d_kv=64, d_ff=2048, num_heads=8, num_layers=1
    )


def mt5_encoder() -> Built:
    return transformer(
        "MT5", "EncoderModel", (4, 33), d_model=512, d_kv=64, d_ff=1024, num_heads=6, num_layers=1,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip


def bart() -> Built:
    return transformer(
        "Bart",
        "Model",
        (1, 60),
        (1, 24),
        arguments=("input_ids", "decoder_input_ids"),
        extra={"use_cache": False},
        d_model=384,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
    )


def smollm(length: int) -> Built:
    return transformer(
        "Llama",
        "ForCausalLM",
        (1, length),
        vocabulary=49152 if length == 1 else 512,
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        **DECODER,
    )


def qwen2(length: int) -> Built:
    return transformer(
        "Qwen2",
        "ForCausalLM",
        (1, length),
        hidden_size=896,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        **DECODER,
    )


def phi() -> Built:
    return transformer(
        "Phi",
        "ForCausalLM",
        (1, 48),
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=4096,
        **DECODER,
    )


def pythia() -> Built:
    return transformer(
        "GPTNeoX",
        "ForCausalLM",
        (2, 32),
        hidden_size=512,
        num_attention_heads=8,
        intermediate_size=2048,
        **DECODER,
    )


def gemma() -> Built:
    return transformer(
        "Gemma",
        "ForCausalLM",
        (1, 20),
        hidden_size=640,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        intermediate_size=2048,
        **DECODER,
    )


def qwen3() -> Built:
    """Root-mean-square norm of every head, as Qwen3 does it; eight sequences."""
    return transformer(
        "Qwen3",
        "ForCausalLM",
        (8, 11),
        hidden_size=384,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1152,
        **DECODER,
    )


def bloom() -> Built:
    return transformer(
        "Bloom", "ForCausalLM", (1, 40), hidden_size=448, n_head=7, n_layer=1, extra={"use_cache": False}
    )


def esm() -> Built:
    return transformer(
        "Esm",
        "Model",
        (1, 150),
        hidden_size=320,
        num_attention_heads=20,
        intermediate_size=1280,
        num_hidden_layers=1,
        position_embedding_type="rotary",
        pad_token_id=1,
        mask_token_id=3,
    )


def whisper() -> Built:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            import transformers

            config = transformers.WhisperConfig(
                d_model=384,
                encoder_layers=1,
                encoder_attention_heads=6,
                encoder_ffn_dim=1536,
                decoder_layers=1,
                vocab_size=51865,
            )
            config._attn_implementation = "eager"
            self.encoder = transformers.WhisperModel(config).encoder

        def forward(self, mel: torch.Tensor) -> torch.Tensor:
            return self.encoder(mel)[0]

    return Encoder(), (torch.randn(1, 80, 3000),)


def wav2vec2() -> Built:
    return transformer(
        "Wav2Vec2",
        "ForCTC",
        (1, 16000),
        arguments=("input_values",),
        vocab_size=32,
        hidden_size=384,
        num_attention_heads=6,
        intermediate_size=1536,
        num_hidden_layers=1,
        conv_dim=(256,) * 7,
        num_conv_pos_embeddings=64,
        feat_extract_norm="group",
    )


def audio_spectrogram() -> Built:
    return transformer(
        "AST",
        "ForAudioClassification",
        (1, 256, 128),
        arguments=("input_values",),
        hidden_size=192,
        num_attention_heads=3,
        intermediate_size=768,
        num_hidden_layers=1,
        max_length=256,
        num_labels=527,
    )


def hifigan() -> Built:
    """Vocoder: transposed 1-D convolutions and dilated residual blocks."""

    def stage(cin: int, cout: int, k: int, stride: int) -> list[nn.Module]:
        up = nn.ConvTranspose1d(cin, cout, k, stride, (k - stride) // 2)
        blocks = [
            Residual(
                nn.Sequential(
                    *act("leaky"), conv(cout, cout, size, a="leaky", norm=None, dims=1, dilation=dilation),
                    conv(cout, cout, size, a=None, norm=None, dims=1),
                )
            )
            for size, dilation in ((3, 1), (7, 3), (11, 5))
        ]  # fmt: skip
        return [nn.LeakyReLU(0.1), up, *blocks]

    layers = nn.Sequential(
        conv(80, 256, 7, a=None, norm=None, dims=1),
        *stage(256, 128, 16, 8),
        *stage(128, 64, 16, 8),
        *stage(64, 32, 4, 2),
        nn.LeakyReLU(0.1),
        conv(32, 1, 7, a="tanh", norm=None, dims=1),
    )
    return layers, (torch.randn(1, 80, 40),)


class GatedUnit(nn.Module):
    """WaveNet's unit: dilated convolution, tanh times sigmoid, residual and skip."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, 2 * channels, 2, dilation=dilation)
        self.out = nn.Conv1d(channels, channels, 1)
        self.dilation = dilation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        return x + self.out(torch.tanh(a) * torch.sigmoid(b))


def wavenet() -> Built:
    layers = nn.Sequential(
        conv(1, 64, 1, a=None, norm=None, dims=1),
        *(GatedUnit(64, dilation) for dilation in (1, 4, 64, 256)),
        conv(64, 128, 1, norm=None, dims=1),
        conv(128, 256, 1, a=None, norm=None, dims=1),
        nn.Softmax(1),
    )
    return layers, (torch.randn(1, 1, 2048),)


def tcn() -> Built:
    def level(cin: int, cout: int, dilation: int) -> nn.Module:
        body = nn.Sequential(
            conv(cin, cout, 7, norm=None, dims=1, dilation=dilation), conv(cout, cout, 7, norm=None, dims=1)
        )
        return Residual(body, "relu", None if cin == cout else nn.Conv1d(cin, cout, 1))

    layers = nn.Sequential(
        level(12, 25, 1), level(25, 25, 8), level(25, 50, 64), Fn(lambda x: x[:, :, -1]), nn.Linear(50, 9)
    )
    return layers, (torch.randn(8, 12, 1000),)


def speech_commands() -> Built:
    """M5 on the raw wave, a stride of 16 first."""
    layers = nn.Sequential(
        conv(1, 32, 80, 16, norm="bn", dims=1, padding=0),
        nn.MaxPool1d(4),
        conv(32, 32, 3, dims=1),
        nn.MaxPool1d(4),
        conv(32, 64, 3, dims=1),
        nn.MaxPool1d(4),
        conv(64, 64, 3, dims=1),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(64, 35),
        nn.LogSoftmax(-1),
    )
    return layers, (torch.randn(4, 1, 16000),)


class Conformer(nn.Module):
    def __init__(self, dim: int, heads: int, kernel: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        self.before, self.after = mlp(dim, 4 * dim, dim, a="silu"), mlp(dim, 4 * dim, dim, a="silu")
        self.attention = Attention(dim, heads)
        self.enter = nn.Conv1d(dim, 2 * dim, 1)
        self.depthwise = conv(dim, dim, kernel, a="silu", groups=dim, dims=1)
        self.leave = nn.Conv1d(dim, dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.before(self.norms[0](x))
        x = x + self.attention(self.norms[1](x))
        y = F.glu(self.enter(self.norms[2](x).transpose(1, 2)), 1)
        x = x + self.leave(self.depthwise(y)).transpose(1, 2)
        return x + 0.5 * self.after(self.norms[3](x))


def conformer() -> Built:
    layers = nn.Sequential(
        conv(1, 32, 3, 2, norm=None),
        conv(32, 32, 3, 2, norm=None),
        Fn(lambda x: x.transpose(1, 2).flatten(2)),
        nn.Linear(640, 144),
        Conformer(144, 4, 31),
        nn.Linear(144, 129),
        nn.LogSoftmax(-1),
    )
    return layers, (torch.randn(1, 1, 401, 80),)


class Recurrent(nn.Module):
    """A GRU's steps spelled out: products with one row (M = batch), gates elementwise."""

    def __init__(self, fan_in: int, hidden: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.x, self.h = nn.Linear(fan_in, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, 10000)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        inputs = self.x(x)
        for step in range(self.steps):
            a, b, c = inputs[:, step].chunk(3, -1)
            d, e, f = self.h(h).chunk(3, -1)
            update = torch.sigmoid(b + e)
            h = (1 - update) * torch.tanh(c + torch.sigmoid(a + d) * f) + update * h
        return self.out(h)


def gru(batch: int) -> Built:
    return Recurrent(200, 650, 2), (torch.randn(batch, 2, 200), torch.randn(batch, 650))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(40, 1280), nn.Linear(320, 1280)
        self.tags = nn.Linear(320, 29)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        i, f, g, o = (self.x(x) + self.h(h)).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return self.tags(torch.sigmoid(o) * torch.tanh(c)).softmax(-1)


def lstm() -> Built:
    return Lstm(), (torch.randn(4, 40), torch.randn(4, 320), torch.randn(4, 320))


NETWORKS = (
    Network("vit-small", "vit", lambda: vit(384, 6, 1, 224, 16)),
    Network("vit-tiny-patch8", "vit", lambda: vit(192, 3, 1, 112, 8)),
    Network("vit-small-patch32@8", "vit", lambda: vit(512, 8, 8, 224, 32)),
    Network("deit@4", "deit", deit),
    Network("swin", "swin", swin),
    Network("segformer", "segformer", segformer),
    Network("mobilevit", "mobilevit", mobilevit),
    Network("poolformer", "poolformer", poolformer),
    Network("levit@2", "levit", levit),
    Network("pvt", "pvt", pvt),
    Network("dinov2", "dinov2", dinov2),
    Network("detr-decoder", "detr", detr_decoder),
    Network("clip-text", "clip", lambda: clip_text(1)),
    Network("clip-text@4", "clip", lambda: clip_text(4)),
    Network("distilbert", "distilbert", distilbert),
    Network("albert@2", "albert", albert),
    Network("electra", "electra", lambda: electra(1, 8)),
    Network("electra@8", "electra", lambda: electra(2, 77)),
    Network("roberta", "roberta", roberta),
    Network("mobilebert", "mobilebert", mobilebert),
    Network("squeezebert", "squeezebert", squeezebert),
    Network("deberta", "deberta", deberta),
    Network("t5-encoder", "t5", t5_encoder),
    Network("mt5-encoder@4", "t5", mt5_encoder),
    Network("bart", "bart", bart),
    Network("smollm-decode", "smollm", lambda: smollm(1)),
    Network("smollm", "smollm", lambda: smollm(100)),
    Network("qwen2-decode", "qwen2", lambda: qwen2(1)),
    Network("qwen2", "qwen2", lambda: qwen2(26)),
    Network("phi", "phi", phi),
    Network("pythia@2", "pythia", pythia),
    Network("gemma", "gemma", gemma),
    Network("qwen3@8", "qwen3", qwen3),
    Network("bloom", "bloom", bloom),
    Network("esm", "esm", esm),
    Network("whisper", "whisper", whisper),
    Network("wav2vec2", "wav2vec2", wav2vec2),
    Network("ast", "ast", audio_spectrogram),
    Network("hifigan", "hifigan", hifigan),
    Network("wavenet", "wavenet", wavenet),
    Network("tcn@8", "tcn", tcn),
    Network("m5@4", "m5", speech_commands),
    Network("conformer", "conformer", conformer),
    Network("gru", "gru", lambda: gru(1)),
    Network("gru@16", "gru", lambda: gru(16)),
    Network("lstm@4", "lstm", lstm),
)
