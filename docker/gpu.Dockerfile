# hvd_gradcomp for NVIDIA GPUs: Horovod with NCCL, gloo and MPI, PyTorch, TensorFlow, Keras 3, and
# the examples. CUDA with its compiler, and NCCL, are packages from PyPI; the driver is the host's.
# It has been built, and run without a GPU only: docs/gpu.md.
#
#   docker build -f docker/gpu.Dockerfile -t hvd-gradcomp:gpu .
#   docker run --gpus all --rm hvd-gradcomp:gpu hvd-gradcomp doctor
#
# BASE_IMAGE             a Debian 12 or Ubuntu 24.04
# HVD_GRADCOMP_CACHE     where the build finds and leaves Horovod's wheel
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS build
ARG PIP_EXTRA_INDEX_URL
ARG HVD_GRADCOMP_CACHE=/var/cache/hvd_gradcomp
ENV HOROVOD_GPU_OPERATIONS=NCCL
WORKDIR /build
COPY docker/install-system.sh docker/
RUN docker/install-system.sh
COPY docker/frameworks.txt docker/gpu.txt docker/constraints.txt docker/image.sh docker/
RUN docker/image.sh frameworks
COPY hvd_gradcomp/cli/build-horovod.sh hvd_gradcomp/cli/
RUN --mount=type=cache,target=/var/cache/hvd_gradcomp docker/image.sh horovod
COPY setup.py pyproject.toml README.md LICENSE ./
COPY hvd_gradcomp hvd_gradcomp
RUN docker/image.sh package

FROM ${BASE_IMAGE}
ARG HOROVOD_GPU_OPERATIONS=NCCL
COPY docker/image.sh docker/cluster.sh /opt/hvd_gradcomp/
RUN /opt/hvd_gradcomp/image.sh system
COPY --from=build /opt/venv /opt/venv
COPY examples /home/horovod/examples
ENV PATH=/opt/venv/bin:/usr/local/nvidia/bin:/usr/local/bin:/usr/bin:/bin TF_CPP_MIN_LOG_LEVEL=3 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER horovod
WORKDIR /home/horovod
EXPOSE 2222
HEALTHCHECK --interval=5m --timeout=2m --start-period=30s \
    CMD ["hvd-gradcomp", "doctor", "--no-self-test"]
ENTRYPOINT ["tini", "--", "/opt/hvd_gradcomp/cluster.sh"]
CMD ["worker"]
