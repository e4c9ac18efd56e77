"""This project's models as transformers has them: `standard` is its Llama, `diff` its DiffLlama.

They are the same functions with the weights under other names and, for DiffLlama, in another order. `diff_v2` has no
class there.
"""

import re

import torch

from config import check_model, need
from model import GPT, GPTConfig

TYPES = {"standard": "llama", "diff": "diffllama"}  # their model_type
NAMES = {  # of weights: ours -> theirs
    r"^tok_emb": "model.embed_tokens", r"^norm": "model.norm", r"^blocks": "model.layers", r"\battn\b": "self_attn",
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "out_proj": "o_proj",
}  # fmt: skip
# What Llamas may choose and this project has one value of.
FIXED = "hidden_act rms_norm_eps rope_parameters attention_bias mlp_bias head_dim intermediate_size quantization_config"


def their_name(name):
    for ours, theirs in NAMES.items():
        name = re.sub(ours, theirs, name)
    return name


def their_config(model, first=None):
    """`first`: the id that a text from nothing starts with. No id ends a text."""
    from transformers import AutoConfig

    cfg = model.cfg
    return AutoConfig.for_model(
        TYPES[cfg.attention], vocab_size=cfg.vocab_size, hidden_size=cfg.n_embd, num_hidden_layers=cfg.n_layer,
        intermediate_size=model.blocks[0].mlp.up_proj.out_features, num_attention_heads=cfg.n_head,
        num_key_value_heads=cfg.kv_heads, max_position_embeddings=cfg.block_size, rms_norm_eps=model.norm.eps,
        rope_theta=cfg.rope_theta, tie_word_embeddings=cfg.tie_embeddings, initializer_range=cfg.init_std,
        bos_token_id=first, eos_token_id=None,
    )  # fmt: skip


def their_weights(model):
    """{their name: tensor}. A pair of heads is (2i, 2i + 1) here and (i, i + n/2) there, of n queries, keys or values;
    the queries that share a key are neighbours in both, so grouped queries need nothing more."""
    weights = model.state_dict()
    if model.cfg.attention == "diff":
        for name in list(weights):
            if re.search("[qkv]_proj", name):
                weights[name] = weights[name].unflatten(0, (-1, 2, model.cfg.head_size)).transpose(0, 1).flatten(0, 2)
            elif "subln" in name:  # their head norm has no gain: the matrix that comes next takes it
                out_proj = name.replace("subln", "out_proj")
                weights[out_proj] = weights[out_proj] * weights.pop(name).repeat(model.cfg.n_head // 2)
    return {their_name(name): w for name, w in weights.items()}


def our_weights(model, weights):
    """The inverse, for a fresh model, whose head norms have gains of 1 already."""
    ours = {name: w if "subln" in name else weights[their_name(name)] for name, w in model.state_dict().items()}
    if model.cfg.attention == "diff":
        for name in ours:
            if re.search("[qkv]_proj", name):
                ours[name] = ours[name].unflatten(0, (2, -1, model.cfg.head_size)).transpose(0, 1).flatten(0, 2)
    return ours


def to_transformers(model, first):
    """A GPT -> a LlamaForCausalLM or DiffLlamaForCausalLM. Raises ValueError where there is none."""
    kind = model.cfg.attention
    need(kind in TYPES, f"transformers has no class for attention={kind!r}, only for {' and '.join(TYPES)}")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(their_config(model, first))
    theirs.load_state_dict(their_weights(model))
    return theirs.eval()


def from_transformers(folder):
    """A folder of a Llama or DiffLlama -> (GPT, their model). Raises ValueError with one sentence for one that is not
    like this project's models."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def read(cls, **how):
        try:
            return cls.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **how)
        except Exception as error:  # whatever a damaged or foreign file provokes, it is the file that is wrong
            raise ValueError(f"{folder} cannot be read: {str(error).strip().splitlines()[0]}") from None

    need((folder / "config.json").is_file(), f"{folder} has no config.json: name a folder that save_pretrained made")
    config = read(AutoConfig)
    kinds = {theirs: ours for ours, theirs in TYPES.items()}
    need(
        config.model_type in kinds,
        f"{folder} has model_type={config.model_type!r}: it must be one of {', '.join(kinds)}",
    )
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    cfg = GPTConfig(
        block_size=config.max_position_embeddings, vocab_size=config.vocab_size, n_layer=config.num_hidden_layers,
        n_head=heads, n_kv_head=shared if shared != heads else 0, n_embd=config.hidden_size,
        attention=kinds[config.model_type], init_std=config.initializer_range,
        rope_theta=config.rope_parameters.get("rope_theta", 0), tie_embeddings=config.tie_word_embeddings,
    )  # fmt: skip
    check_model(cfg)
    with torch.device("meta"):  # no weights yet: the folder may hold a large model of another shape
        same = their_config(GPT(cfg))
    for name in FIXED.split():
        theirs, value = getattr(config, name, None), getattr(same, name, None)
        need(theirs == value, f"{folder} has {name}={theirs!r}: this project's models have {value!r}")
    how = dict(dtype=torch.float32, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True)
    theirs, info = read(AutoModelForCausalLM, **how)
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])})
    need(not wrong, f"{folder} has not the weights that its config.json speaks of: {', '.join(wrong[:3])}")
    ours = GPT(cfg).eval()
    ours.load_state_dict(our_weights(ours, theirs.state_dict()))
    return ours, theirs.eval()
