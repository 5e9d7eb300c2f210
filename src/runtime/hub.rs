//! stub
use crate::identity::certificate::Certificate;
use crate::identity::device::{DeviceId, DeviceKey};
use crate::mesh::node::{Input, Output};
use std::net::SocketAddr;
use tokio::sync::mpsc;
#[allow(missing_docs)]
pub struct HubConfig {
    pub port: u16,
    pub first_contact_port: Option<u16>,
    pub broadcast: bool,
}
#[allow(missing_docs)]
pub struct Hub {}
#[allow(missing_docs)]
impl Hub {
    pub fn new(_: HubConfig, _: mpsc::Sender<Input>, _: DeviceId) -> Self {
        Self {}
    }
    pub fn add_device(&mut self, _: &DeviceKey, _: &Certificate) -> std::io::Result<u16> {
        Ok(0)
    }
    pub fn remove_device(&mut self, _: &DeviceId) {}
    pub fn listen_network(&mut self, _: SocketAddr) -> std::io::Result<u16> {
        Ok(0)
    }
    pub fn start_first_contact(&mut self) {}
    pub fn first_contact_problem(&self) -> Option<String> {
        None
    }
    pub fn execute(&mut self, _: Output) {}
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        tokio::spawn(task);
    }
    pub async fn shutdown(&mut self) {}
}
