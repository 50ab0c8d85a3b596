"""The packages that are known: what their code does with the devices and tensors that a program gives it.

A program's device is safe to edit only if all packages that it uses are in one of these tables. Those of
:mod:`acclimate_port.source.cuda_packages` and :mod:`acclimate_port.source.device_choosers` have rules of
their own.
"""

from __future__ import annotations

import sys

from acclimate_port.source.cuda_packages import (
    CUDA_PACKAGES,
    KERNEL_PACKAGES,
    NEEDED,
    OPERATORS,
    RUNTIMES,
)
from acclimate_port.source.device_choosers import BY_CALL, BY_IMPORT

_FOR_ANY_AS_TORCH = {
    *("torch", "torchvision", "torchaudio", "torchtext", "torchdata", "torchrl", "torchmetrics", "torchao"),
    *("torchtune", "torchtitan", "functorch", "torch_geometric", "transformers", "diffusers", "accelerate"),
    *("peft", "trl", "safetensors", "timm", "optimum", "deepspeed", "acclimate", "tensordict", "einops"),
}
"""Packages that follow torch's devices, and mean any accelerator by a flag or a number."""
FOLLOW_TORCH = _FOR_ANY_AS_TORCH | {
    *("torch_scatter", "torch_sparse", "ignite"),
    *("lightning", "lightning_fabric", "pytorch_lightning", "lightning_utilities"),
    *("monai", "kornia", "botorch", "gpytorch", "linear_operator", "pyro", "open_clip", "clip"),
    *("lpips", "piq", "huggingface_hub", "skorch", "pytorch3d"),
    *("segment_anything", "torchdiffeq", "torchsde", "torchcde", "torchinfo"),
    *("fvcore", "iopath", "ptflops", "pytorch_msssim", "segmentation_models_pytorch", "efficientnet_pytorch"),
    *("pretrainedmodels", "loralib", "x_transformers", "rotary_embedding_torch", "opt_einsum", "evaluate"),
    *("vector_quantize_pytorch", "hyper_connections", "axial_positional_embedding", "lion_pytorch"),
    *("torch_optimizer", "pytorch_optimizer", "prodigyopt", "schedulefree", "dadaptation"),
    *("torchcrf", "TorchCRF", "torch_ema", "ema_pytorch", "higher", "learn2learn", "pytorch_metric_learning"),
    *("torchlibrosa", "auraloss", "e3nn", "pytorch_wavelets", "facenet_pytorch", "captum"),
    *("bert_score", "pytorch_pretrained_bert", "pytorch_transformers", "torchcontrib", "warmup_scheduler"),
    *("pytorch_warmup", "adabelief_pytorch", "madgrad", "normflows", "nflows", "zuko", "escnn"),
    *("pytorch_fid", "torchdyn", "roma", "pypose", "entmax", "sparsemax"),
    *("torchfile", "tensorly", "geoopt", "local_attention", "performer_pytorch", "reformer_pytorch"),
    *("linformer", "vit_pytorch", "denoising_diffusion_pytorch"),
    *("torch_audiomentations", "asteroid_filterbanks", "julius"),
}
"""Packages that give a device's name to torch, and whose tensors and modules are where torch's are."""
BUILT_ON_TORCH = FOLLOW_TORCH | {
    *("sentence_transformers", "flair", "stable_baselines3"),
    *("fairscale", "fairseq", "mmcv", "mmengine", "detectron2", "nemo", "megatron", "lm_eval"),
}
"""Those and others, which choose a device by themselves or have operators of their own."""
_WITH_DEVICES_AND_TENSORS = {"ultralytics", "whisperx", "spacy", "thinc", "torchcodec", "taichi", "warp"}
_TAKE_TENSORS = _WITH_DEVICES_AND_TENSORS | {"bitsandbytes", "spconv", "torchsparse", "MinkowskiEngine"}
"""Packages with devices or layers of their own that get torch's tensors."""
OF_OTHERS = _WITH_DEVICES_AND_TENSORS | {
    *("faster_whisper", "ctranslate2", "xgboost", "lightgbm", "catboost", "onnxruntime", "onnx"),
    *("sklearn", "tokenizers", "jax", "jaxlib", "tensorflow", "cupy", "cuml", "cudf"),
    *("numba", "llama_cpp", "paddle", "paddleocr", "mxnet", "openvino", "tensorrt"),
    *("faiss", "nvidia", "cuda", "triton", "pycuda", "sherpa_onnx", "fastembed", "rapidocr"),
}
"""Packages with devices of their own, which do not know torch's names for other accelerators."""
KEEP_SETTINGS = {
    *("wandb", "mlflow", "neptune", "comet_ml", "swanlab", "clearml", "aim", "tensorboard", "tensorboardX"),
    *("yaml", "ruamel", "toml", "tomli_w", "orjson", "omegaconf", "hydra", "easydict", "munch", "addict"),
    *("ml_collections", "yacs", "box", "absl", "gin", "fire", "tyro", "jsonargparse", "simple_parsing"),
    *("draccus", "sacred", "attrs", "cattrs", "loguru", "rich", "tabulate", "prettytable", "tqdm"),
    *("numpy", "pandas", "ray", "optuna", "submitit", "dill", "cloudpickle", "joblib", "six", "typeguard"),
}
"""Packages that store, show or pass on settings, and choose no device by them."""
FOR_ANY = _FOR_ANY_AS_TORCH | {
    *("pytest", "click", "typer", "pydantic", "attr", "parameterized", "hypothesis", "nose", "matplotlib"),
    *("seaborn", "scipy", "datasets", "psutil", "packaging", "requests", "colorama", "termcolor"),
}
"""Packages that mean any accelerator by a flag or a number, or that choose no device by one."""
_OF_HOST = {
    "numbers, tables, files": """
        numpy scipy pandas polars pyarrow xarray dask numexpr bottleneck sympy statsmodels patsy networkx
        igraph shapely geopandas rasterio pyproj healpy h5py tables zarr netCDF4 lmdb lz4 zstandard blosc
        msgpack msgpack_numpy msgspec ujson simplejson jsonlines json5 orjson ijson openpyxl xlrd xlwt
        xlsxwriter fsspec s3fs gcsfs smart_open boto3 botocore google azure oss2 mpi4py minio paramiko pssh
        redis sqlalchemy pymongo peewee diskcache filelock portalocker xxhash dateutil pytz arrow tzlocal
        cytoolz toolz more_itertools sortedcontainers frozendict multidict decorator wrapt cachetools
        tenacity retry backoff typing_extensions mypy_extensions importlib_metadata importlib_resources
        pkg_resources setuptools distutils pip wheel packaging Cython cffi pybind11 cvxpy cvxopt casadi
        ortools pulp gurobipy nlopt skopt hyperopt bayes_opt ConfigSpace nevergrad deap cma pymoo SALib
        emcee lifelines munkres lap filterpy ot umap hdbscan annoy hnswlib pynndescent implicit surprise
        dataclasses_json dacite marshmallow jsonschema cerberus beartype overrides strenum deepdiff
        dict_deep plum multipledispatch braceexpand natsort shortuuid coolname hostlist pystow outdated path
        pathos multiprocess psutil numa setproctitle threadpoolctl line_profiler memory_profiler objgraph
        pympler ml_dtypes
    """,
    "texts": """
        sentencepiece regex ftfy nltk jieba Levenshtein rapidfuzz editdistance gensim sacrebleu sacremoses
        rouge rouge_score subword_nmt unidecode anyascii inflect pypinyin g2p_en g2pk jamo ko_pron
        pyopenjtalk cn2an opencc phonemizer num2words num_thai indic_transliteration eng_to_ipa zhon
        ahocorasick tiktoken langdetect langid emoji contractions textblob bs4 lxml html5lib markdown
        pypandoc panflute jiwer mosestokenizer fugashi MeCab janome konlpy kss sentence_splitter pysbd
        seqeval evalica nlgeval pycocoevalcap language_evaluation tokenize_rt speedtest pygments jinja2 mako
        chardet charset_normalizer pyparsing lark
    """,
    "images, sound, video": """
        PIL cv2 skimage imageio imageio_ffmpeg tifffile rawpy OpenEXR Imath png pyexr imagecodecs pyvips
        accimage turbojpeg jpeg4py simplejpeg av decord moviepy skvideo ffmpeg imgaug albumentations
        imagecorruptions Augmentor imutils imagehash pytesseract pydicom nibabel SimpleITK itk nrrd medpy
        dicom2nifti ants nilearn mne pyedflib wfdb bids openslide dlib bbox_visualizer pydensecrf
        pycocotools lvis panopticapi cityscapesscripts nuscenes pyquaternion motmetrics trackeval plyfile
        trimesh pyrender pyvista vtk open3d pymeshlab pyglet OpenGL moderngl mesh2sdf soundfile librosa
        audioread resampy soxr sox pydub pyloudnorm pyworld pesq pystoi mir_eval museval musdb stempeg
        webrtcvad pysptk python_speech_features pyroomacoustics acoustics noisereduce audiomentations
        pedalboard pretty_midi mido miditoolkit miditok music21 note_seq muspy kaldi_io kaldiio lhotse
        praatio textgrid tgt dtw fastdtw pycwt pywt gammatone pyaudio sounddevice midi2audio
    """,
    "molecules and other sciences": """
        rdkit openbabel ase pymatgen Bio biotite prody mdtraj MDAnalysis openmm parmed pdbfixer freesasa
        pyscf spglib matminer molvs selfies mordred meeko scanpy anndata loompy pyfaidx pysam pybedtools
        pyBigWig cooler obonet goatools periodictable mendeleev monty astropy sunpy uproot awkward obspy
        metpy cartopy cfgrib eccodes h3 osmnx folium contextily pysolar pymol
    """,
    "figures and pages": """
        matplotlib mpl_toolkits seaborn plotly bokeh altair pyecharts graphviz pydot pygraphviz visdom
        livelossplot tikzplotlib adjustText wordcloud cmocean palettable colorcet webcolors colour gradio
        gradio_client streamlit dash panel IPython ipywidgets jupyter notebook nbformat dominate flask
        flask_cors fastapi uvicorn starlette sse_starlette pydantic_settings django tornado aiohttp httpx
        websockets gevent grpc zmq kafka pika celery gunicorn werkzeug urllib3 requests_toolbelt wget gdown
        tweepy slack_sdk telegram discord openai anthropic cohere dspy pyfiglet alive_progress progress
        progressbar termcolor colorama colorlog coloredlogs crayons texttable terminaltables logzero
        structlog icecream pretty_errors blessings humanize humanfriendly hurry pyfakefs pytest_mock mock
        pytest_lazyfixture nox xmlrunner flaky freezegun responses moto assertpy testfixtures coverage
        doctest ipdb pudb pdbpp ptvsd debugpy pydevd sphinx docutils recommonmark myst_parser
        sphinx_rtd_theme sphinx_gallery sphinx_book_theme numpydoc mkdocs docstring_parser dotenv decouple
        environs configargparse configobj toml tomli tomlkit pyhocon hyperpyyaml argbind argcomplete docopt
        plac cleo prompt_toolkit questionary tap ruamel_yaml envyaml guildai dvc dvclive tensorboard_logger
        dllogger wandb_gql
    """,
    "games and simulations of the host": """
        gym gymnasium pettingzoo supersuit minigrid gym_minigrid dm_control dm_env mujoco mujoco_py pybullet
        pybullet_data pybullet_envs atari_py ale_py procgen pygame nes_py gym_super_mario_bros vizdoom
        minerl crafter nle metaworld d4rl d4rl_atari robosuite robocasa mimicgen dmc2gym smac pysc2
        s2clientprotocol multiagent highway_env sumolib traci carla airsim pysimplegui chess open_spiel
        pyspiel acados_template pinocchio urdfpy rosbag rospy tf2_ros sensor_msgs geometry_msgs datasets
        tensorflow_datasets tensorflow_hub tensorflow_graphics tensorflow_probability webdataset
        mosaicml_streaming petrel_client kaggle openml pmlb ucimlrepo imblearn category_encoders
        feature_engine tslearn sktime pmdarima prophet tsfresh optax flax haiku chex orbax distrax rlax cog
        langchain langchain_community langchain_core langchain_openai langchain_text_splitters langgraph
        llama_index chromadb future past builtins __main__ Queue cPickle StringIO ConfigParser urllib2
        urlparse cookielib HTMLParser Tkinter tkFileDialog thread commands copy_reg
    """,
}
OF_HOST = set(" ".join(_OF_HOST.values()).split())
"""Packages that compute on the host, and whose functions get no tensor that is on a device."""
KNOWN = (
    FOLLOW_TORCH
    | OF_OTHERS
    | KEEP_SETTINGS
    | FOR_ANY
    | OF_HOST
    | CUDA_PACKAGES
    | KERNEL_PACKAGES
    | NEEDED
    | {name for name in OPERATORS if "." not in name}
    | {*RUNTIMES, *BY_CALL, *BY_IMPORT, *sys.stdlib_module_names}
) - _TAKE_TENSORS
"""All packages of which something is known."""
