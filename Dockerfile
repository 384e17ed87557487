# The gateway, worker and admin commands in one image: docker build -t inferplane . && \
#   docker run -p 8080:8080 inferplane serve --engine http://ENGINE:8000
# Settings and secrets come from INFERPLANE_* variables or mounted files at run time; none is in a layer.

FROM python:3.11.14-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/inferplane
WORKDIR /src
# First the pinned requirements alone: this layer is built again only when they change.
COPY requirements/runtime.txt requirements/runtime.txt
RUN /opt/inferplane/bin/pip install --requirement requirements/runtime.txt
COPY . .
RUN /opt/inferplane/bin/pip install --no-deps .

FROM python:3.11.14-slim-bookworm
# A fixed, non-root user; a number, so that Kubernetes' runAsNonRoot can check it.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin inferplane \
    && install --directory --owner 10001 --group 10001 --mode 0700 /var/lib/inferplane
COPY --from=build /opt/inferplane /opt/inferplane
ENV PATH=/opt/inferplane/bin:$PATH PYTHONUNBUFFERED=1 \
    INFERPLANE_DATA_DIR=/var/lib/inferplane INFERPLANE_HOST=0.0.0.0 INFERPLANE_PORT=8080
USER 10001
WORKDIR /var/lib/inferplane
VOLUME /var/lib/inferplane
EXPOSE 8080
# The base image has no curl. /healthz, not /readyz: a gateway that drains or waits for its database is alive.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(f'http://127.0.0.1:{os.environ[\"INFERPLANE_PORT\"]}/healthz', timeout=2)"]
ENTRYPOINT ["inferplane"]
CMD ["serve"]
